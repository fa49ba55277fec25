"""Embedder of a recipe as a function of texts, for the map functions of other engines
(`flatshift.selection.features.ShardWriter`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.select.adapted import Embed
from flatshift.experiments.select.embedding import ByItself, embedding_by_itself
from flatshift.finetune.errors import UserError
from flatshift.selection.config import Embedder, Gradients


class RecipeEmbedder:
    """texts → (n, dim) float32, the same vectors as `flatshift select` computes with the recipe's `select.embedder`.

    embedder: the model's states (`backbone`, `encoder`), gradients of a light adapter on it (`gradients`), or word
    vectors (`static`). moments: texts for Adam's second moments of gradients, the same in every task and for the target
    (the embedder draws `moment_texts` of them); other embedders ignore them. A pickle holds settings only: the model is
    loaded at a process's first call.

    Raises UserError for an embedder that is fitted to pool and target, or gradients without texts for their moments.
    """

    def __init__(self, recipe: Recipe, embedder: Embedder, moments: Sequence[str] = ()):
        if not isinstance(embedder, ByItself):
            raise UserError(
                f"select.embedder.kind: {embedder.kind} is no function of a text alone; take backbone, encoder, "
                "gradients or static, or TfIdfEmbedder, fitted once"
            )
        if isinstance(embedder, Gradients) and embedder.adam and not moments:
            raise UserError(
                "moments: gradients are divided by the root of their second moments; give a few hundred texts of the "
                "pool, the same in every task, or set select.embedder.adam to false"
            )
        self.recipe, self.embedder, self.moments = recipe, embedder, tuple(moments)
        self._embed: Embed | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_embed": None}

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        if self._embed is None:
            self._embed = embedding_by_itself(self.recipe, self.embedder, self.moments, keyed=False).embed
        return self._embed(list(texts))
