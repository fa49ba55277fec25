"""What a run writes down on its way: losses and errors, what the adapter has become, and how curved its place is.

    recorded_steps(Record(), 100)                # (0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 100)
    judged = per_example(model, examples, Inference(batch_size=32, pad_id=0), task=task)
    split_figures("train", judged, recording.flipped)
    adapter_figures(AdaptedLayers(model).factors())

`flatshift.finetune.train.trainer` drives a `Recorder` made of these pieces; the rest are functions.
"""
