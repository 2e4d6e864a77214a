"""A mover over a bucket that misbehaves: every fault has its outcome, no wrong byte, no hang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bad_bucket import BadBucket, bad_bucket
from support.movers import MoverDesk, kinds, mover_desk
from support.tiers import family

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.tiers.remote.names import LAYOUT, MARK_NAME

pytest.importorskip("obstore")
OF = family(length=300_000)


@pytest.fixture(scope="module", autouse=True)
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "s3"
    path.write_text("id\nsecret\n")
    return path


@pytest.fixture(scope="module")
def served(secret: Path) -> Iterator[tuple[BadBucket, MoverDesk]]:
    with bad_bucket() as bucket, mover_desk(f"{bucket.url}&secret_file={secret}") as desk:
        desk.up()
        assert kinds(desk.put(range(4), OF)) == ["Done"] * 4
        yield bucket, desk


@pytest.fixture(autouse=True)
def good_again(served: tuple[BadBucket, MoverDesk]) -> Iterator[None]:
    bucket, desk = served
    yield
    bucket.mode = ""
    # A probe that began before may find something wrong once more.
    desk.until(lambda: kinds(desk.get(range(4), OF)) == ["Done"] * 4)
    desk.up()


def test_values_have_the_names_of_the_prefix(served: tuple[BadBucket, MoverDesk]) -> None:
    bucket, _ = served
    mark = f"/bucket/p/{MARK_NAME}"
    assert all(path.startswith(f"/bucket/p/{LAYOUT}/") for path in set(bucket.values) - {mark})


BAD_READS = {
    "403": "Failed denied",
    "404": "Failed denied",
    "429": "Failed io",
    "500": "Failed io",
    "reset": "Failed unreachable",
    "truncated": "Failed unreachable",
    "short": "Corrupt remote",
    "flipped": "Corrupt remote",
    "endless_said_right": "Corrupt remote",
}


def test_bad_answers_to_a_read(served: tuple[BadBucket, MoverDesk]) -> None:
    bucket, desk = served
    for mode, outcome in BAD_READS.items():
        bucket.mode = mode
        assert kinds(desk.get(range(3), OF)) == [outcome] * 3, mode
        bucket.mode = ""
        # A refusal makes the mover probe its remote, perhaps while that still refused.
        desk.until(lambda: kinds(desk.get(range(4), OF)) == ["Done"] * 4)


def test_a_wrong_object_is_found(served: tuple[BadBucket, MoverDesk]) -> None:
    bucket, desk = served
    bucket.mode = "wrong_object"
    assert set(kinds(desk.get(range(3), OF))) <= {"Corrupt remote", "Missing"}


@pytest.mark.parametrize("mode", ["stall", "trickle", "endless"])
def test_a_read_that_does_not_end_is_told_by_its_deadline(
    served: tuple[BadBucket, MoverDesk], mode: str
) -> None:
    bucket, desk = served
    kills = desk.mover.counts["kills"]
    bucket.mode = mode
    request = desk.get_request(range(3), OF)
    answer = desk.final(desk.mover.submit(request, 0.4))
    assert set(kinds(answer)) <= {"Failed timeout", "Failed io", "Failed unreachable"}
    assert (desk.slot(request.places[0, 0], OF.length) == 0xEE).all()
    assert desk.mover.counts["kills"] == kills, "the library keeps this deadline"


def test_bad_answers_to_a_write(served: tuple[BadBucket, MoverDesk]) -> None:
    bucket, desk = served
    for mode, outcome in (("403", "Failed denied"), ("500", "Failed io")):
        bucket.mode = mode
        # A probe that began under the mode before may refuse it once more.
        desk.until(lambda wanted=outcome: kinds(desk.put([50, 51], OF)) == [wanted] * 2)
        bucket.mode = ""
        desk.until(lambda: kinds(desk.exists([50, 51], OF)) == ["Missing"] * 2)


def test_a_stalled_write_ends_at_its_deadline(served: tuple[BadBucket, MoverDesk]) -> None:
    bucket, desk = served
    bucket.mode = "stall"
    ticket = desk.mover.submit(desk.put_request([60], OF), 0.5)
    assert kinds(desk.final(ticket)) == ["Failed timeout"]


def test_nobody_there_is_unreachable(secret: Path) -> None:
    with bad_bucket() as bucket:
        url = bucket.url
    with mover_desk(f"{url}&secret_file={secret}") as desk:
        desk.until(lambda: "cannot be reached" in desk.mover.problem)
        assert kinds(desk.get([0], OF)) == ["Failed unreachable"]


@pytest.mark.parametrize(("mode", "text"), [("404", "bucket exists"), ("403", "secret")])
def test_a_missing_bucket_and_a_wrong_secret_are_named(secret: Path, mode: str, text: str) -> None:
    with bad_bucket() as bucket:
        bucket.mode = mode
        with mover_desk(f"{bucket.url}&secret_file={secret}") as desk:
            desk.until(lambda: text in desk.mover.problem)
            assert kinds(desk.get([0], OF)) == ["Failed denied"]
            assert kinds(desk.exists([0], OF)) == ["Failed denied"]
            bucket.mode = ""
            desk.up()
            assert kinds(desk.exists([0], OF)) == ["Missing"]


def test_payloads_are_not_hashed_and_requests_not_repeated(
    served: tuple[BadBucket, MoverDesk],
) -> None:
    bucket, desk = served
    bucket.requests.clear()
    bucket.mode = "500"
    desk.put([80], OF)
    puts = [each for each in bucket.requests if each[0] == "PUT"]
    assert len(puts) == 1
    assert bucket.payload_sums == {"UNSIGNED-PAYLOAD"}


def test_a_skewed_clock_is_named(secret: Path) -> None:
    with bad_bucket() as bucket:
        bucket.mode = "skew"
        with mover_desk(f"{bucket.url}&secret_file={secret}") as desk:
            desk.until(lambda: "clock" in desk.mover.problem)
            assert kinds(desk.get([0], OF)) == ["Failed denied"]


@pytest.fixture
def renewed(tmp_path: Path) -> Iterator[tuple[BadBucket, MoverDesk, Path]]:
    """A bucket whose keys hold for a session, and the file that they are renewed in."""
    keys = tmp_path / "keys"
    keys.write_text("id\nsecret\none\n")
    with bad_bucket() as bucket, mover_desk(f"{bucket.url}&secret_file={keys}") as desk:
        bucket.token = "one"
        desk.up()
        yield bucket, desk, keys


def test_keys_that_expired_are_read_again(renewed: tuple[BadBucket, MoverDesk, Path]) -> None:
    bucket, desk, keys = renewed
    pid = desk.mover.pid
    bucket.token = "two"
    for ask in (desk.exists, desk.get, desk.put):  # the answer to the first one has no body
        assert set(kinds(ask([0], OF))) == {"Failed denied"}
    desk.until(lambda: "refuses access" in desk.mover.problem)
    keys.write_text("id\nsecret\ntwo\n")
    desk.up()
    assert kinds(desk.put([0], OF)) == kinds(desk.get([0], OF)) == ["Done"]
    assert desk.mover.pid == pid


def test_keys_that_were_renewed_before_they_expire_are_used_then(
    renewed: tuple[BadBucket, MoverDesk, Path],
) -> None:
    bucket, desk, keys = renewed
    keys.write_text("id\nsecret\ntwo\n")
    assert kinds(desk.put([0], OF)) == ["Done"], "the former ones hold still"
    assert bucket.tokens == {"one"}
    bucket.token = "two"
    desk.until(lambda: kinds(desk.get([0], OF)) == ["Done"])
    bucket.token = ""
    keys.write_text("id\nsecret\nthree\n")
    good = desk.mover.good_probes
    desk.mover.reopen()
    desk.until(lambda: desk.mover.good_probes > good)
    assert bucket.tokens == {"one", "two", "three"}, "as the daemon asked for it"


def test_a_cut_object_that_a_lookup_finds_is_told(
    served: tuple[BadBucket, MoverDesk],
) -> None:
    bucket, desk = served
    before = set(bucket.values)
    assert kinds(desk.put([70, 71], OF)) == ["Done"] * 2
    for path, more in zip(sorted(set(bucket.values) - before), (-1, 1), strict=True):
        bucket.values[path] = bucket.values[path].ljust(OF.length * 2)[: OF.length // 2 + more]
    altered = desk.mover.counts["altered"]
    assert kinds(desk.exists([70, 71], OF)) == ["Corrupt remote"] * 2
    assert desk.mover.counts["altered"] == altered + 2
    desk.delete([70, 71])


def test_a_name_that_is_not_known_is_unreachable(secret: Path) -> None:
    url = f"s3://bucket/p?endpoint=https://none-such.invalid&region=r&secret_file={secret}"
    with mover_desk(url) as desk:
        desk.until(lambda: desk.mover.up and desk.mover.problem)
        assert kinds(desk.get([0], OF)) in (["Failed unreachable"], ["Failed timeout"])


def test_secrets_are_not_on_the_command_line(served: tuple[BadBucket, MoverDesk]) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    lines = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)
    assert b"fleet key" not in lines
    assert HUNG_S
