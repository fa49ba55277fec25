"""Many adapters on one frozen backbone: one forward and one backward pass for the cells of a sweep together.

    cells = [cell_engine(backbone, adapter, task=task, train=train) for adapter, train in ...]
    with Host(backbone, cells, task=task, pad_id=0) as host:
        for place, end in run_together(host, [stage_work(cell, ...) for cell in cells]):
            ...                                    # a StageResult, or the error that ended this cell alone

Each cell is a stage of the ordinary loop (`flatshift.finetune.train.loop.train_stage`) with a PEFT model of its own
whose frozen tensors are the backbone's; only its forward and backward passes are done here, for all cells at once.
Whatever the loop does besides (order of the data, learning rate, clipping, optimizer, regularizer, dev, records) is the
loop's own doing.
"""
