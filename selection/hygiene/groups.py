"""Connected components that grow by batches of edges, in array arithmetic."""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components


class Groups:
    """Rows 0 … n−1, at first each for itself. `label` (n,): the smallest row of each row's group."""

    def __init__(self, n: int):
        self.label = np.arange(n)

    def join(self, one: np.ndarray, other: np.ndarray) -> None:
        """Join the groups of `one[i]` and `other[i]` for every i."""
        edges = np.stack([self.label[one], self.label[other]])
        edges = edges[:, edges[0] != edges[1]]
        if not edges.size:
            return
        nodes, index = np.unique(edges, return_inverse=True)
        left, right = index.reshape(2, -1)
        graph = coo_matrix((np.ones(len(left), np.int8), (left, right)), shape=(len(nodes), len(nodes)))
        _, component = connected_components(graph, directed=False)
        smallest = np.full(component.max() + 1, len(self.label))
        np.minimum.at(smallest, component, nodes)
        parent = np.arange(len(self.label))
        parent[nodes] = smallest[component]
        self.label = parent[self.label]


def crowds(keys: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows that share their key with another one.

    keys, rows: (n,), the rows in ascending order. Returns members, the rows of each such crowd in ascending order,
    crowd after crowd, and the number of each one's crowd, from 0.
    """
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    same = keys[1:] == keys[:-1]
    shared = np.zeros(len(keys), dtype=bool)
    shared[1:] |= same
    shared[:-1] |= same
    opens = np.ones(len(keys), dtype=bool)
    opens[1:] = ~same
    return rows[order][shared], np.cumsum(opens[shared]) - 1
