"""A cache in a bucket, served here by moto: run with `-m slow` where s3fs and moto are installed beside the project."""

from contextlib import suppress

import pytest
import torch

from configs.runtime.errors import InputError
from distill.cache.reader import open_cache
from distill.cache.storage import Folder
from tests.support.caches import batch_of, cache_job, random_conversations, run, shard_files, write_rows

pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def endpoint(monkeypatch):
    """A bucket named `bucket`, reached as packages for S3 find it by themselves."""
    import s3fs

    running = server.ThreadedMotoServer(port=0)
    running.start()
    host, port = running.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with suppress(FileExistsError):  # moto remembers it
        s3fs.S3FileSystem().mkdir("bucket")
    yield
    s3fs.S3FileSystem.clear_instance_cache()
    running.stop()


def test_a_cache_in_a_bucket_is_that_on_a_disk(endpoint, tmp_path, byte_target):
    rows = random_conversations([(3, 2 + number) for number in range(12)], 258, seed=5)
    data = write_rows(tmp_path / "train.jsonl", rows)

    def job(output):
        return cache_job(byte_target, data, rows, output, batch_size=3, shard_megabytes=0.002, dtype="float32")

    assert run(job("s3://bucket/runs/cache")) == run(job(tmp_path / "cache"))
    bucket = Folder("s3://bucket/runs/cache")
    assert {name: bucket.read(name) for name in bucket.names() - {"run.json"}} == shard_files(tmp_path / "cache")
    assert not bucket.create("job.json", b"another one's")
    batch = batch_of(rows, [7, 0, 3])
    signals = [open_cache(name, data, byte_target).signal(batch) for name in ("s3://bucket/runs/cache", tmp_path / "cache")]
    assert torch.equal(*signals)
    bucket.delete(["shard-00000.safetensors"])
    with pytest.raises(InputError, match=r"s3://bucket/runs/cache/shard-00000\.safetensors is missing"):
        open_cache("s3://bucket/runs/cache", data, byte_target).signal(batch)
    run(job("s3://bucket/runs/cache"))  # makes what is missing
    assert torch.equal(open_cache("s3://bucket/runs/cache", data, byte_target).signal(batch), signals[0])


def test_a_bucket_without_credentials_or_that_is_not_there_is_a_sentence(endpoint, monkeypatch):
    with pytest.raises(InputError, match=r"s3://nowhere/cache cannot be written: .*bucket does not exist"):
        Folder("s3://nowhere/cache").write("a", b"")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(InputError, match=r"s3://bucket/cache cannot be listed: .*credentials"):
        Folder("s3://bucket/cache").names()
