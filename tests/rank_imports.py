"""What nearly every rank of the tests imports: `tests.distributed_ranks` does so once and forks the ranks off it."""

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

import finetune.evaluate
import finetune.parallel.build
import finetune.train.loop
import regularizers

__all__ = [
    "AutoTokenizer",
    "BertForSequenceClassification",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",
    "Trainer",
    "finetune",
    "peft",
    "regularizers",
    "torch",
]
