from dynamo_snapshot.model import Reason
from worker_hooks.reasons import EXPLANATIONS, HookError, HookReason


def test_every_code_is_explained() -> None:
    assert set(EXPLANATIONS) == set(HookReason)
    for meaning, remedy in EXPLANATIONS.values():
        assert meaning.endswith(".")
        assert remedy.endswith(".")


def test_what_the_domain_model_has_a_code_for_has_no_second_one() -> None:
    """The names are alike where the meanings are: a server that does not answer, and a bug."""
    for shared in (Reason.SERVER_UNREACHABLE, Reason.INTERNAL_ERROR):
        assert HookReason(shared.value)


def test_an_error_names_cause_code_and_remedy() -> None:
    error = HookError(HookReason.LEASE_LOST, "instance 7 is not in discovery any more")
    assert str(error).startswith("instance 7 is not in discovery any more [lease_lost]. Start it again.")
