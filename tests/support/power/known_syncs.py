"""Every place of ours that asks for a sync, and SQLite's: what a power cut breaks without it, or
why nothing breaks. A place that stands in no table fails the test.
"""

from __future__ import annotations

_NAME = "durable.sync_directory < "
_MADE = _NAME + "durable.make_directory < "

NOTICED = {
    "segment.sync < append._sync < append.append": "a commit: its records",
    "segment.sync < append._sync < append._finish": "a commit over two segments: the first's",
    _NAME + "segment.create < append._start": "a new segment's name, with all its records",
    "segment.sync < reclaim.erase < reclaim.remove": "a removal: the records come back",
    "home._write_once < home.write < keyring.open_keys": "KEY is empty: nothing opens",
    "home._write_once < home.write < rotate._new_key": "KEY.next is empty: nothing opens",
    _NAME + "home._write_once < home.write": "KEYID names a next key that has no name",
    "segment.sync < recover.sync < recover._adopt_synced": "what a killed writer left and the next"
    " one adopted",
    _MADE + "home.create_or_open": "the store's folder, with everything",
    "blobs._write < blobs.put_new < remote._commit": "a shared record's bytes",
    _NAME + "blobs._write < blobs.put_new": "a shared record's name",
    _NAME + "blobs._write < blobs.put": "its entry's name: nobody could purge it",
    _NAME + "blobs.delete < remote._delete": "a removed shared record comes back",
    _MADE + "blobs.__init__": "the medium's folder, with everything",
    _MADE + "blobs._keep_folder": "a folder of the medium, with its records",
    "terms._write < terms.start": "an empty term file: the directory does not start",
    _NAME + "terms._write < terms.start": "a used term is given again",
    _MADE + "terms._write": "the term file's folder: a used term is given again",
    "sqlite index.sqlite-wal": "SQLite's log: rows come back whose bytes were erased",
}

LATE = (
    "segment.sync < append._sync < append.append",
    "segment.sync < append._sync < append._finish",
    "segment.sync < reclaim.erase < reclaim.remove",
    _NAME + "segment.create < append._start",
    "home._write_once < home.write < keyring.open_keys",
    "blobs._write < blobs.put_new < remote._commit",
    _NAME + "blobs._write < blobs.put_new",
    _NAME + "blobs._write < blobs.put",
    _NAME + "blobs.delete < remote._delete",
    "terms._write < terms.start",
    _NAME + "terms._write < terms.start",
)
"""Behind the acknowledgement, or the new name, that it must come before."""

COVERED = {
    "before the lives": "the test's own",
    "blobs._write < blobs.put < catalogue.write": "an entry's body is a hint; its name counts",
    _NAME + "blobs.delete < catalogue.delete": "an entry without a record expires",
    _NAME + "home._write_once < home._superblock": "the next name's sync keeps STORE's too; where"
    " STORE is made again, the segments still say what it said",
    _NAME + "home.rename < keyring.settle": "KEYID says which of KEY and KEY.next it is",
    "home._write_once < home.write < keyring.write_key_id": "made anew from the key",
    _NAME + "reclaim.drop_empty < tier.evict": "its records were erased before",
    _NAME + "reclaim.drop_empty < recover.run": "its records were erased before",
    _NAME + "reclaim.drop_empty < maintain.collect": "its records were erased before",
    "segment.sync < reclaim.erase < recover.run": "doomed until it is synced: erased once more",
    "segment.sync < reclaim.erase < tier.release_quarantine": "doomed until it is synced",
    "sqlite index.sqlite": "SQLite's checkpoint: an index that is damaged is made again",
    "sqlite store": "an index that is damaged is made again",
    "sqlite index.sqlite-journal": "the index's first minute: it is made anew",
}

SELDOM = {
    _NAME + "reclaim.drop_empty < reclaim.compact": "an old copy comes back after its removal: one"
    " state in 180 to 240 near it",
}
"""Noticed too seldom for every run, or not seen to be noticed."""

DIRECTED = {
    "home._write_once < home._superblock < home.create_or_open": "STORE of a new store is empty,"
    " and no segment says what it said: nothing opens",
    "blobs._write < blobs.put_new < agreement.agree": "the medium's fingerprint is empty: whoever"
    " comes first with another key shuts out those who have the right one",
    _NAME + "blobs.settle < agreement.agree": "the medium's fingerprint, whose writer was killed:"
    " whoever comes first with another key is let in",
    _NAME + "blobs.settle < remote._stands": "a record that is said to be stored, and whose writer"
    " was killed",
    _NAME + "recover.sync_names < recover.scan": "the name of a segment whose maker was killed,"
    " with the records that went in it since",
}
"""Noticed in a life that leads there: `tests/store/test_power_loss_after_kill.py`."""
