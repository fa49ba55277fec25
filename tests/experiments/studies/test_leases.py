"""Claims of hosts on names in a shared directory: one holder, nothing lost with a dead one, no clock is compared."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from flatshift.experiments.studies.leases import CLAIMS, Leases, check_unclaimed, claim_holder, list_claims
from flatshift.finetune.errors import UserError


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def host(folder: Path, clock: Clock | None = None, lost: list[str] | None = None) -> Leases:
    """One that gives a sign of life only when a test asks it to."""
    return Leases(folder, seconds=60.0, lost=(lost or []).append, clock=clock or Clock())


def test_a_name_has_one_holder_until_it_is_released(tmp_path):
    ours, theirs = host(tmp_path), host(tmp_path, clock := Clock())
    assert ours.take("cell") and ours.take("cell") and ours.take("another-1")
    assert not theirs.take("cell")
    ours.release("cell")
    assert not theirs.take("cell"), "it looks again after a while, not for each of thousands of cells"
    clock.now += 15.0
    assert theirs.take("cell") and not ours.take("cell") and not theirs.take("another-1")


def test_a_claim_lapses_when_its_own_reader_saw_no_sign_of_life_for_so_long(tmp_path):
    ours, theirs = host(tmp_path), host(tmp_path, clock := Clock())
    assert ours.take("cell") and not theirs.take("cell")
    (claim,) = tmp_path.iterdir()
    for _ in range(5):  # alive, whatever the time of the file says
        clock.now += 59.0
        assert ours._renew_claim("cell", claim)
        os.utime(claim, (0, 0))
        assert not theirs.take("cell")
    clock.now += 59.0
    assert not theirs.take("cell")
    clock.now += 61.0
    assert theirs.take("cell")
    assert [path.name for path in tmp_path.iterdir()] == ["cell-1"]


def test_who_was_held_up_learns_that_his_claim_is_anothers(tmp_path):
    lost: list[str] = []
    taken = Leases(tmp_path, seconds=0.4, lost=lost.append)
    assert taken.take("cell")  # its thread has not begun: a host that stands still
    clock = Clock()
    theirs = host(tmp_path, clock)
    assert not theirs.take("cell")
    clock.now = 61.0
    assert theirs.take("cell")
    with taken:
        deadline = time.monotonic() + 60
        while not lost and time.monotonic() < deadline:
            time.sleep(0.02)
    assert lost and set(lost) == {"cell"}
    assert list_claims(tmp_path.parent) == [] and theirs.take("cell")


def test_one_of_many_takes_over(tmp_path):
    dead = host(tmp_path)
    assert dead.take("cell")
    hosts = [host(tmp_path, Clock()) for _ in range(8)]
    assert not any(one.take("cell") for one in hosts)
    for one in hosts:
        one._clock.now = 61.0
    begin, won = threading.Barrier(8), []

    def race(one: Leases) -> None:
        begin.wait()
        won.append(one.take("cell"))

    threads = [threading.Thread(target=race, args=(one,)) for one in hosts]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(won) == [False] * 7 + [True]


def test_claims_are_renewed_while_the_context_lasts_and_gone_after_it(tmp_path):
    with Leases(tmp_path / CLAIMS, seconds=0.4) as leases:
        assert leases.take("cell")
        (claim,) = list_claims(tmp_path)
        before = claim.read_bytes()
        assert claim_holder(claim).startswith(f"process {os.getpid()} on ")
        with pytest.raises(UserError, match=r"is worked on by process .* add --shared to take part"):
            check_unclaimed(tmp_path)
        deadline = time.monotonic() + 60
        while claim.read_bytes() in (before, b"") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert claim.read_bytes() != before
    assert not (tmp_path / CLAIMS).exists()
    check_unclaimed(tmp_path)


def test_waiting_for_a_name_says_for_whom(tmp_path):
    with Leases(tmp_path, seconds=0.4) as ours, Leases(tmp_path, seconds=60.0) as theirs:
        assert ours.take("plan")
        told: list[str] = []
        threading.Timer(0.5, ours.release, ["plan"]).start()
        with theirs.exclusive("plan", on_wait=told.append):
            assert not ours.take("plan")
        assert told == [f"process {os.getpid()} on {os.uname().nodename}"]
