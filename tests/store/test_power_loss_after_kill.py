"""A kill, one more process, then a power cut: what the killed one had asked of the disk and not
synced looked durable to the next.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ownerserve.kv.clock import ManualClock
from ownerserve.kv.errors import InvalidInput, OwnerServeError
from ownerserve.store.disk import reclaim
from ownerserve.store.format import segment as segment_module
from ownerserve.store.format.model import AlreadyStored, ReadHit, Want, WriteDone
from ownerserve.store.format.seal import Keys
from ownerserve.store.format.segment import segment_path
from ownerserve.store.tiers import blobs
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.blobs import DirectoryBlobs
from ownerserve.store.tiers.buffers import BufferPool
from ownerserve.store.tiers.remote import RemoteTier
from tests.support.power import faults
from tests.support.power.after import Killed, cuts, recorded
from tests.support.power.artifacts import TENANTS, meta, open_shared, payload
from tests.support.power.campaign import at_cuts
from tests.support.power.check import lay_out
from tests.support.power.cuts import FILE_SYSTEMS
from tests.support.power.known_syncs import DIRECTED

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]
OPEN = """
from pathlib import Path
from ownerserve.kv.clock import ManualClock
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.tiers.backend import put
from tests.support.power.artifacts import TENANTS, open_shared
from tests.support.store.samples import Samples

clock, home = ManualClock(1.7e9), Path({home!r})
options = DiskOptions(segment_bytes=1 << 20)
"""
OPEN_DISK = OPEN + "tier = DiskTier(home / 'store', clock, options=options)\n"


class States:
    """The states that a cut may leave after the script that follows a kill, laid out one by one."""

    def __init__(self, killed: Killed, script: str, tmp_path: Path) -> None:
        home = tmp_path / "killed"
        script = script.replace("{home!r}", repr(str(home)))
        home.mkdir(exist_ok=True)
        self._recording, self._before = recorded(home, script, tmp_path / "log", killed=killed)
        self._scratch = tmp_path

    def drop(self, site: str) -> None:
        """From here on the disk passes over the syncs of `site`."""
        assert site in faults.sites([self._recording])
        self._recording = faults.dropped(self._recording, site)

    def anywhere(self) -> Iterator[Path]:
        """Of a cut at any point."""
        return self._at(cuts(self._recording, self._before, 2))

    def at_the_end(self) -> Iterator[Path]:
        """Of a cut when the script had been acknowledged all."""
        return self._at([len(self._recording.events)] * 40)

    def _at(self, points: list[int]) -> Iterator[Path]:
        for name in FILE_SYSTEMS:
            rng = random.Random(name)
            for at, case in enumerate(at_cuts(self._recording, name, points, rng)):
                place = self._scratch / f"{name} {at}"
                lay_out(case.state, place)
                yield place
                shutil.rmtree(place)


def killed_at(module: object, name: str, tmp_path: Path, patch: pytest.MonkeyPatch) -> Path:
    """Keep the test's home as it is when `name` of `module` is first called, as a kill would."""
    real, home = getattr(module, name), tmp_path / "killed"

    def call(*arguments: object) -> object:
        if not home.exists():
            shutil.copytree(tmp_path / "home", home)
        return real(*arguments)

    patch.setattr(module, name, call)
    return home


def holds_but_without(
    name: str,
    states: States,
    where: Callable[[States], Iterator[Path]],
    check: Callable[[Path], None],
) -> None:
    """`check` passes in every state; on a disk that passes over the sync of `name`, not in all."""
    for place in where(states):
        check(place)
    (site,) = (site for site in DIRECTED if name in site)
    states.drop(site)

    def is_broken(place: Path) -> bool:
        try:
            check(place)
        except (AssertionError, OwnerServeError, pytest.fail.Exception):
            return True
        return False

    assert any(is_broken(place) for place in where(states)), f"nothing is broken without {site}"


def test_what_the_killed_writer_had_removed_is_not_said_to_be_stored(
    open_disk, samples, tmp_path, monkeypatch
):
    """Killed after the index had the removal, before that was synced and the hole was punched."""
    tier = open_disk(tmp_path / "home" / "store")
    for name in "xyz":
        put(tier, samples.meta(name), samples.payload(name))
    wal = "store/index.sqlite-wal"
    synced = (tmp_path / "home" / wal).stat().st_size
    home = killed_at(reclaim.Reclaimer, "erase", tmp_path, monkeypatch)
    tier.remove([samples.meta("x").id])
    assert (home / wal).stat().st_size > synced
    states = States(Killed(tails={wal: synced}), OPEN_DISK + "tier.close()", tmp_path)
    for place in states.anywhere():
        again = open_disk(place / "store")
        said = put(again, samples.meta("x"), samples.payload("x"))
        assert isinstance(said, AlreadyStored | WriteDone)
        assert samples.read(again, *"xyz") == [samples.payload(name) for name in "xyz"], said
        again.close()


def test_records_in_a_segment_whose_maker_was_killed_stand(
    open_disk, samples, tmp_path, monkeypatch
):
    """Killed before the new segment's name was synced; the next writer goes on in it."""
    tier = open_disk(tmp_path / "home" / "store")
    home = killed_at(segment_module, "sync_directory", tmp_path, monkeypatch)
    put(tier, samples.meta("x"), samples.payload("x"))
    script = OPEN_DISK + "put(tier, Samples.meta('y'), Samples.payload('y'))"
    (segment,) = (home / "store" / "segments").iterdir()
    states = States(Killed(made=[str(segment.relative_to(home))]), script, tmp_path)

    def check(place: Path) -> None:
        again = open_disk(place / "store")
        assert samples.read(again, "y") == [samples.payload("y")]
        again.close()

    holds_but_without("recover.sync_names", states, States.at_the_end, check)


def test_a_store_in_a_folder_whose_maker_was_killed_stands(open_disk, samples, tmp_path):
    """Killed when it had made the first folder of the path, and not synced that one's name."""
    (tmp_path / "killed" / "new").mkdir(parents=True)
    script = OPEN + "tier = DiskTier(home / 'new' / 'store', clock, options=options)\n"
    script += "put(tier, Samples.meta('y'), Samples.payload('y'))"
    for place in States(Killed(made=["new"]), script, tmp_path).at_the_end():
        again = open_disk(place / "new" / "store")
        assert samples.read(again, "y") == [samples.payload("y")]
        again.close()


def test_an_old_copy_whose_segment_the_killed_writer_unlinked_does_not_come_back(
    open_disk, samples, tmp_path, monkeypatch
):
    """Killed in a compaction before the folder was synced; the next writer removes the record."""
    tier = open_disk(tmp_path / "home" / "store")
    put(tier, samples.meta("x"), samples.payload("x"))
    tier.core.appender.retire()
    put(tier, samples.meta("y"), samples.payload("y"))
    old = segment_path(tmp_path / "home" / "store", 1)
    data = old.read_bytes()
    home = killed_at(reclaim, "sync_directory", tmp_path, monkeypatch)
    (row, _) = tier.core.index.segments()
    tier.core.reclaimer.compact(
        row, tier.core.keys, landing=BufferPool(), now_ms=0, on_bad=tier.core.quarantine
    )
    gone = str(old.relative_to(tmp_path / "home"))
    assert not (home / gone).exists()
    script = OPEN_DISK + "assert tier.remove([Samples.meta('x').id]) == 1"
    for place in States(Killed(gone={gone: data}), script, tmp_path).at_the_end():
        again = open_disk(place / "store")
        assert samples.read(again, "x") == "absent"
        assert samples.read(again, "y") == [samples.payload("y")]
        again.close()


def test_a_shared_record_that_the_killed_node_unlinked_is_purged(clock, tmp_path, monkeypatch):
    """Killed before the unlinking was synced; the next node purges the tenant."""
    shared = open_shared(tmp_path / "home", clock)
    number = next(n for n in range(1, 9) if meta(n).tenant == TENANTS[0])
    assert isinstance(put(shared, meta(number), payload(number)), WriteDone)
    before = {path: path.read_bytes() for path in (tmp_path / "home").rglob("*") if path.is_file()}
    home = killed_at(blobs, "sync_directory", tmp_path, monkeypatch)
    shared.remove([meta(number).id])
    gone = {str(path.relative_to(tmp_path / "home")): data for path, data in before.items()}
    gone = {name: data for name, data in gone.items() if not (home / name).exists()}
    assert [name.split("/")[3] for name in gone] == ["records"]
    script = OPEN + "tier = open_shared(home, clock); tier.purge(TENANTS[0]); tier.close()"
    for place in States(Killed(gone=gone), script, tmp_path).at_the_end():
        assert open_shared(place, clock).find([meta(number).id]) == {}


def killed_before_the_name_of(
    blob: str, clock: ManualClock, tmp_path: Path, patch: pytest.MonkeyPatch
) -> States:
    """The first node of a medium was killed before it had synced the name of a blob: those below
    `blob`. Another one is then to store the same record."""
    shared, home = open_shared(tmp_path / "home", clock), tmp_path / "killed"
    real = blobs.sync_directory

    def killed(folder: Path) -> None:
        if blob in folder.parts and not home.exists() and any(map(Path.is_file, folder.iterdir())):
            shutil.copytree(tmp_path / "home", home)
        real(folder)

    patch.setattr(blobs, "sync_directory", killed)
    assert isinstance(put(shared, meta(6), payload(6)), WriteDone)
    (named,) = (path for path in home.rglob(f"{blob}/**/*") if path.is_file())
    script = OPEN + "from tests.support.power.artifacts import meta, payload\n"
    script += "put(open_shared(home, clock), meta(6), payload(6))"
    return States(Killed(named=[str(named.relative_to(home))]), script, tmp_path)


def test_a_shared_record_that_is_said_to_be_stored_stands(clock, tmp_path, monkeypatch):
    states = killed_before_the_name_of("records", clock, tmp_path, monkeypatch)

    def check(place: Path) -> None:
        assert isinstance(open_shared(place, clock).read([Want(meta(6).id)]), ReadHit)

    holds_but_without("remote._stands", states, States.at_the_end, check)


def test_a_medium_keeps_to_the_key_of_a_killed_node(clock, tmp_path, monkeypatch):
    states = killed_before_the_name_of("key", clock, tmp_path, monkeypatch)

    def check(place: Path) -> None:
        medium = DirectoryBlobs(place / "shared" / "new" / "medium")
        other = RemoteTier("shared", medium, clock=clock, keys=Keys(b"another key".ljust(32)))
        with pytest.raises(InvalidInput):
            other.agree()

    holds_but_without("blobs.settle < agreement.agree", states, States.at_the_end, check)


def test_a_new_store_opens_wherever_its_making_was_cut(open_disk, tmp_path):
    states = States(Killed(), OPEN_DISK + "tier.close()", tmp_path)

    def check(place: Path) -> None:
        open_disk(place / "store").close()

    holds_but_without("home._superblock", states, States.anywhere, check)


def test_a_damaged_store_file_is_made_again_wherever_that_was_cut(open_disk, samples, tmp_path):
    """Whatever is durable of the new one, the segments say the same: no sync of it is needed."""
    tier = open_disk(tmp_path / "killed" / "store")
    put(tier, samples.meta("x"), samples.payload("x"))
    tier.close()
    (tmp_path / "killed" / "store" / "STORE").write_bytes(b"damaged")
    states = States(Killed(), OPEN_DISK + "tier.close()", tmp_path)
    for drop in (False, True):
        if drop:
            states.drop("home._write_once < home._superblock < home.create_or_open")
        for place in states.anywhere():
            again = open_disk(place / "store")
            assert samples.read(again, "x") == [samples.payload("x")]
            again.close()


def test_a_medium_keeps_to_its_key(clock, tmp_path):
    """Who comes with another key is refused before it writes, also when the power was out."""
    script = OPEN + "from tests.support.power.artifacts import meta, payload\n"
    script += "put(open_shared(home, clock), meta(6), payload(6))"
    states = States(Killed(), script, tmp_path)

    def check(place: Path) -> None:
        medium = DirectoryBlobs(place / "shared" / "new" / "medium")
        other = RemoteTier("shared", medium, clock=clock, keys=Keys(b"another key".ljust(32)))
        with pytest.raises(InvalidInput):
            other.agree()
        assert isinstance(open_shared(place, clock).read([Want(meta(6).id)]), ReadHit)

    holds_but_without("put_new < agreement.agree", states, States.at_the_end, check)
