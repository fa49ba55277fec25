"""Imports of nearly every rank of the tests: `tests.support.distributed_ranks` has them once, and forks the ranks."""

import peft
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    Trainer,
)

import flatshift.finetune.evaluate
import flatshift.finetune.parallel.build
import flatshift.finetune.train.trainer
from flatshift import regularizers

__all__ = [
    "AutoTokenizer",
    "BertForSequenceClassification",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",
    "Trainer",
    "flatshift",
    "peft",
    "regularizers",
    "torch",
]
