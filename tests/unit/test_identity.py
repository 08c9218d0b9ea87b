import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from worker_hooks.control import ControlDirectory, Release, RestoreContext
from worker_hooks.identity import LINKS, ChildLink, apply_environment, follow, hand_on, read_context, reseed
from worker_hooks.reasons import HookError, HookReason


def _context(folder: Path, incarnation: str | None) -> ControlDirectory:
    (folder / "restore-context.json").write_text(json.dumps({"env": {"A": "1"}, "incarnation": incarnation}))
    return ControlDirectory(folder)


@pytest.mark.parametrize(
    ("context", "complete", "known"),
    [("a", "a", "a"), ("a", None, "a"), (None, "a", "a"), (None, None, None)],
)
def test_who_it_is(tmp_path: Path, context: str | None, complete: str | None, known: str | None) -> None:
    found = read_context(_context(tmp_path, context), Release(captured=False, incarnation=complete))
    assert found == RestoreContext(env={"A": "1"}, incarnation=known)


def test_two_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HookError, match=r"restore-complete names b, .*names a") as failure:
        read_context(_context(tmp_path, "a"), Release(captured=False, incarnation="b"))
    assert failure.value.reason is HookReason.INCARNATION_MISMATCH


def test_null_unsets() -> None:
    environ = {"STAYS": "1", "CHANGES": "1", "GOES": "1"}
    apply_environment(RestoreContext(env={"CHANGES": "2", "GOES": None, "NEVER_WAS": None, "COMES": ""}), environ)
    assert environ == {"STAYS": "1", "CHANGES": "2", "COMES": ""}


def test_the_same_state_gives_different_numbers_after_reseeding() -> None:
    import numpy as np

    drawn = []
    for _ in range(3):
        random.seed(7)
        np.random.seed(7)
        reseed()
        drawn.append((random.random(), float(np.random.random())))
    assert len({each for each, _ in drawn}) == len({each for _, each in drawn}) == 3


def test_torch_is_reseeded_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    class Torch:
        @staticmethod
        def manual_seed(seed: int) -> None:
            seeds.append(seed)

    monkeypatch.setitem(sys.modules, "torch", Torch)
    reseed()
    reseed()
    assert len(set(seeds)) == 2
    assert all(0 <= each < 1 << 63 for each in seeds)


def test_nothing_is_loaded_for_it() -> None:
    code = "import sys; from worker_hooks.identity import reseed; reseed(); print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


NewLink = Callable[[str], ChildLink]


@pytest.fixture
def new_link() -> Iterator[NewLink]:
    made: list[ChildLink] = []

    def new(name: str) -> ChildLink:
        made.append(ChildLink(name))
        return made[-1]

    yield new
    for link in made:
        link.forget()
    assert LINKS == []


def _child(end: Connection, answers: Connection) -> None:
    random.seed(7)
    follow(end, lambda context: answers.send((os.environ.get("DYN_X"), random.random(), context.incarnation)))
    answers.send("ready")
    answers.poll(30)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_take_over_the_identity_before_the_parent_goes_on(method: str, new_link: NewLink) -> None:
    process = multiprocessing.get_context(method)
    link = new_link("engine")
    ours, theirs = process.Pipe()
    child = process.Process(target=_child, args=(link.child_end, theirs))  # type: ignore[attr-defined]  # of every context
    child.start()
    assert ours.recv() == "ready"
    seen = []
    for incarnation in ("one", "two"):
        hand_on(RestoreContext(env={"DYN_X": incarnation}, incarnation=incarnation), timeout_s=10)
        assert ours.poll(0), "acknowledged before it was applied"
        seen.append(ours.recv())
    assert [(each[0], each[2]) for each in seen] == [("one", "one"), ("two", "two")]
    assert seen[0][1] != seen[1][1]
    ours.send("end")
    child.join(10)


def test_a_child_that_does_not_follow_is_named(new_link: NewLink) -> None:
    link = new_link("engine-core")
    with pytest.raises(HookError, match=r"child engine-core did not answer within 0\.05 s") as failure:
        link.push(RestoreContext(env={}, incarnation="one"), timeout_s=0.05)
    assert failure.value.reason is HookReason.CHILD_SILENT
    link.child_end.close()
    with pytest.raises(HookError, match="child engine-core is gone"):
        link.push(RestoreContext(env={}, incarnation="one"), timeout_s=1)
