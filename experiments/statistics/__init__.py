"""Double descent in curves: a peak test that is valid with few seeds, verdicts with evidence, thresholds.

    from flatshift.experiments.statistics import Curve, determine_verdict

    verdict = determine_verdict(Curve(axis="rank", values=ranks, test=errors, train_error=fitted, train_loss=losses))

`peak` tests and locates, `verdict` names, `curve_comparison` compares two curves, `emc` finds where training data
stop being fitted; `intervals` has t-intervals, paired tests and Holm's correction. Arrays in, verdicts out: nothing
here knows of files or recipes, trains a network or imports torch.
"""

from flatshift.experiments.statistics.curve import Curve
from flatshift.experiments.statistics.curve_comparison import compare_curves
from flatshift.experiments.statistics.peak import peak_test
from flatshift.experiments.statistics.verdict import determine_verdict

__all__ = ["Curve", "compare_curves", "determine_verdict", "peak_test"]
