import pytest

from worker_hooks.engines.resident import ResidentMemory
from worker_hooks.reasons import HookError, HookReason


def test_the_digest_is_of_all_of_it() -> None:
    memory = ResidentMemory(3)
    memory.check()
    for at in (0, 1 << 20, (3 << 20) - 1):
        memory._memory[at] ^= 1
        with pytest.raises(HookError, match="3 MiB of memory digest to") as failure:
            memory.check()
        assert failure.value.reason is HookReason.SELF_TEST_FAILED
        memory._memory[at] ^= 1
    memory.check()


def test_no_page_is_zero() -> None:
    """CRIU leaves zero pages out of the image: they would make it look smaller than an engine's."""
    memory = ResidentMemory(2)
    assert all(any(memory._memory[start : start + 4096]) for start in range(0, memory.size, 4096))


def test_two_boots_differ() -> None:
    assert ResidentMemory(1).digest != ResidentMemory(1).digest


def test_none_is_some() -> None:
    ResidentMemory(0).check()
