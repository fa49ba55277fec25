"""One recipe on any mesh: ZeRO-3 (FSDP2), tensor, pipeline and context parallelism, applied from outside the model."""
