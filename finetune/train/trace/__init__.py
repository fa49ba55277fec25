"""Trace of a run: losses and errors, state of the adapter, and curvature of the loss.

recorded_steps(TraceRecording(), 100)        # (0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 100)
scores = score_examples(model, examples, EvalBatching(batch_size=32, pad_id=0), task=task)
split_metrics("train", scores, recording.flipped)
adapter_metrics(AdaptedLayers(model).factors())
"""
