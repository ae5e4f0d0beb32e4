"""Packed sets on a real HTTP server, and one of S3's protocol."""

import errno
import fcntl
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import readers
from file_server import FileServer

from hvdkit.data.prepare import pack
from hvdkit.data.readers import remote
from hvdkit.data.readers.records import Records
from hvdkit.data.source import Arrays
from hvdkit.stop import passes

SHARDS = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """30 pictures packed in 6 shards, as train and val."""
    root = tmp_path_factory.mktemp("set")
    pictures = np.stack([readers.noise(number, 16, 16) for number in range(30)])
    for name in ("train", "val"):
        source = Arrays(image=pictures, label=np.arange(30) % 2)
        pack.pack(source, root, name, shards=SHARDS)
    return root


@pytest.fixture
def server(root, tmp_path):
    remote.limit(str(tmp_path / "cache"), 1)
    with FileServer(root).up() as server:
        yield server
    remote.limit("", 100)


def everything(source) -> list:
    return [part.tolist() for part in source.fetch(np.arange(len(source)))]


def test_it_is_the_local_set_and_two_that_read_at_once_fetch_each_shard_once(
    root, server
):
    local = Records(root, "train")
    server.latency = 0.02
    two = [Records(Path(server.url), "train") for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        samples = [*pool.map(everything, two)]
    assert (
        samples == [everything(local)] * 2
        and two[0].fingerprint() == local.fingerprint()
    )
    requests = dict(server.asked)
    requests.pop("pack.json")
    shards = [f"train-0000{number}-of-00006.tfrecord" for number in range(SHARDS)]
    assert requests == dict.fromkeys(["index.bin", *shards], 1)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda data: data[:-200] + bytes(200),
            "(of sample 14) that does not match its checksum",
        ),
        (lambda data: data[:-1], "sends"),
    ],
)
def test_a_damaged_file_is_never_used(root, server, tmp_path, spoil, words: str):
    source = Records(server.url, "train")
    bad = root / "train" / "train-00002-of-00006.tfrecord"
    data = bad.read_bytes()
    try:
        bad.write_bytes(spoil(data))
        for _ in range(2):
            faults = everything(source)[1]
            assert [bool(fault) for fault in faults] == [
                10 <= n < 15 for n in range(30)
            ]
            assert (
                words in faults[10]
                and server.url in faults[10]
                and not passes(faults[10])
            )
        assert server.asked[bad.name] == 2 and not [
            *(tmp_path / "cache").rglob(bad.name)
        ]
    finally:
        bad.write_bytes(data)
    source = Records(server.url, "train")
    assert everything(source)[1] == [""] * 30
    (kept,) = (tmp_path / "cache").rglob(bad.name)
    kept.write_bytes(bytes(len(data)))  # the disk of this host damaged it
    assert everything(source)[1] == [""] * 30 and kept.read_bytes() == data
    (index,) = (tmp_path / "cache").rglob("index.bin")
    places = index.read_bytes()
    index.write_bytes(places[16:32] + places[:16] + places[32:])
    assert everything(Records(server.url, "train")) == everything(
        Records(root, "train")
    )


def test_a_server_that_sends_too_much_is_cut_off(server):
    source = Records(server.url, "train")
    server.surplus = 500
    assert "(it must know Range)" in source.fetch(np.array([0]))[1][0]
    with pytest.raises(ValueError, match=r"pack\.json"):
        Records(server.url, "val")
    assert server.sent < 250  # of thrice 500 that are sent, sockets hold the rest


def test_links_of_another_user_in_a_shared_cache_lose_and_change_nothing(
    root, server, tmp_path
):
    cache = tmp_path / "cache"
    papers = tmp_path / "papers"
    cache.mkdir()
    cache.chmod(0o1777)
    papers.mkdir(mode=0o755)
    (papers / "thesis").write_bytes(bytes(10_000))
    os.utime(papers / "thesis", (1, 1))  # the oldest goes first
    (cache / "packed-00000000000000000000000000000000").symlink_to(papers)
    remote.limit(str(cache), (2 * max(Records(root, "train").shard_bytes) + 600) / 1e9)
    source = Records(server.url, "train")
    source.keep_open(1)
    assert [source.fetch(np.array([sample]))[1] for sample in range(0, 30, 5)] == [
        [""]
    ] * SHARDS
    assert [*papers.iterdir()] == [papers / "thesis"]

    (folder,) = [path for path in cache.glob("packed-*") if not path.is_symlink()]
    shutil.rmtree(folder)
    folder.symlink_to(papers)
    with pytest.raises(
        ValueError, match=rf"--cache_dir={cache}: {folder} is a link, or of anoth"
    ):
        Records(server.url, "train")
    assert papers.stat().st_mode & 0o777 == 0o755 and [*papers.iterdir()] == [
        papers / "thesis"
    ]
    cache.chmod(0o777)
    with pytest.raises(
        ValueError, match=rf"--cache_dir={cache} may be changed by other users"
    ):
        Records(server.url, "train")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give folders away")
@pytest.mark.parametrize("name", ["", "packed"])
def test_a_cache_of_another_user_is_refused(name: str, server, tmp_path):
    cache = tmp_path / "cache"
    Records(server.url, "train").fetch(np.array([0]))
    (folder,) = cache.glob("packed-*")
    os.chown(folder if name else cache, 65534, -1)
    with pytest.raises(ValueError, match=rf"--cache_dir={cache}.* of another user"):
        Records(server.url, "train")


def test_what_is_open_stays_and_the_oldest_of_the_rest_goes(
    root, server, monkeypatch, tmp_path
):
    sizes = Records(root, "train").shard_bytes
    sources = [Records(server.url, name) for name in ("train", "val")]
    remote.limit(str(tmp_path / "cache"), (sum(sizes) + 2000) / 1e9)
    with pytest.raises(
        ValueError, match=r"--cache_gb=\S+ is less .* give --shuffle_shards"
    ):
        remote.check_fits(0, *sources)
    with pytest.raises(
        ValueError, match=r"--shuffle_shards=3 .* lower it, or raise --cache_gb"
    ):
        remote.check_fits(3, *sources)
    remote.check_fits(1, *sources)

    remote.limit(str(tmp_path / "cache"), (sum(sizes[:3]) + max(sizes) + 600) / 1e9)
    others = tmp_path / "cache" / "others" / "file"
    others.parent.mkdir(parents=True)
    others.write_bytes(bytes(2 * sum(sizes)))
    source = Records(server.url, "train")
    source.keep_open(1)
    for sample in (0, 5, 10, 0, 15, 20):  # each is the first sample of a shard
        assert source.fetch(np.array([sample]))[1] == [""]
        there = {int(path.name[6:11]) for path in (tmp_path / "cache").glob("*/train*")}
        stored = sum(
            path.stat().st_size for path in (tmp_path / "cache").glob("packed-*/*")
        )
        assert sample // 5 in there and stored <= sum(sizes[:3]) + max(sizes) + 600
    assert 0 in there and 1 not in there and others.exists()
    open_shards = [source._opened(shard) for shard in there]
    monkeypatch.setattr(remote, "_WAIT", 1.0)
    since = time.monotonic()
    _, faults = source.fetch(np.arange(5, 10))
    assert time.monotonic() - since < 4  # each waited once
    assert "No space left on device: all of --cache_gb" in faults[0]
    assert all(passes(fault) for fault in faults)
    del open_shards
    assert source.fetch(np.array([5]))[1] == [""]


def test_credentials_that_end_in_mid_run_spoil_no_sample(server):
    source = Records(server.url, "train")
    server.status = 403
    fault = source.fetch(np.array([0]))[1][0]
    assert "403" in fault and passes(fault)
    with pytest.raises(ValueError, match=r"pack.json cannot be read: .* 403"):
        Records(server.url, "train")


def test_a_suspended_run_that_fetches_is_not_waited_for_for_ever(
    server, monkeypatch, tmp_path
):
    monkeypatch.setattr(remote, "_LOCKED", 0.3)
    source = Records(server.url, "train")
    source.fetch(np.array([0]))
    (folder,) = (tmp_path / "cache").glob("packed-*")
    with (folder / ".train-00001-of-00006.tfrecord.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fault = source.fetch(np.array([5]))[1][0]
    assert "Device or resource busy" in fault and passes(fault)
    assert source.fetch(np.array([5]))[1] == [""]


def test_a_cache_without_locks_is_refused(server, monkeypatch, tmp_path):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        ValueError, match=r"--cache_dir=.*no locks .flock: Function not implemented"
    ):
        Records(server.url, "train")


def test_a_full_disk_is_not_taken_for_a_damaged_file(server, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda file, data, first: write(file, data[:9], first)
    )
    fault = Records(server.url, "train").fetch(np.array([0]))[1][0]
    assert "No space left on device" in fault and passes(fault)


def test_a_full_disk_loses_what_is_not_in_use(root, server, monkeypatch, tmp_path):
    disk_size = 3 * max(Records(root, "train").shard_bytes)

    def disk_usage(_: object = None) -> SimpleNamespace:
        files = (tmp_path / "cache").glob("packed-*/*")
        return SimpleNamespace(
            free=disk_size - sum(path.stat().st_size for path in files)
        )

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    source = Records(server.url, "train")
    source.keep_open(1)
    for sample in range(0, 30, 5):
        assert source.fetch(np.array([sample]))[1] == [""] and disk_usage().free >= 0


@pytest.mark.parametrize(
    "url, words",
    [
        (
            "{url}/nothing",
            r"/nothing/train/pack.json is missing: is that what hvdkit pack wrote",
        ),
        ("http://127.0.0.1:9", r"Remote I/O error: .*Cannot connect"),
        (
            "nope://bucket",
            r"--data_dir=nope://bucket.* begins with s3://, gs:// or https://",
        ),
        (
            "https://me:secret@host/set",
            r"--data_dir: a URL is kept in files .* leave out",
        ),
        (
            "s3://me:secret@bucket/set",
            r"--data_dir: a URL is kept in files .* leave out",
        ),
        ("http://", r"http:///train/pack.json cannot be read: InvalidUrl"),
    ],
)
def test_what_cannot_be_opened_is_a_sentence(server, url, words):
    with pytest.raises((ValueError, OSError), match=words) as raised:
        Records(url.format(url=server.url), "train")
    assert passes(raised.value) == ("127.0.0.1:9" in url) and "\n" not in str(
        raised.value
    )


def test_without_fsspec_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match=r"s3://some/set.* pip install fsspec s3fs"):
        Records("s3://some/set", "train")


@pytest.mark.slow
def test_from_a_server_of_s3(root, server, monkeypatch):
    moto = pytest.importorskip("moto.server", reason="pip install moto[server] s3fs")
    fsspec = pytest.importorskip("s3fs", reason="pip install moto[server] s3fs")
    s3 = moto.ThreadedMotoServer("127.0.0.1", 0)
    s3.start()
    monkeypatch.setenv(
        "AWS_ENDPOINT_URL", "http://{}:{}".format(*s3.get_host_and_port())
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        with pytest.raises(
            ValueError, match=r"s3://bucket/set/train/pack.json cannot be read"
        ):
            Records("s3://bucket/set", "train")
        monkeypatch.setenv(name, "some")
    with pytest.raises(ValueError, match="is missing"):
        Records("s3://bucket/set", "train")
    files = fsspec.S3FileSystem(skip_instance_cache=True)
    files.mkdir("bucket")
    files.put(str(root), "bucket/set", recursive=True)
    assert everything(Records("s3://bucket/set", "train")) == everything(
        Records(root, "train")
    )
    s3.stop()
