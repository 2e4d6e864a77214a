"""URLs of remotes: what is read, and what is refused with a sentence that helps."""

from __future__ import annotations

import pytest
from support.cases import cases

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.tiers.remote.url import RemoteUrl, parse_remote


def test_urls_are_read() -> None:
    url = parse_remote(
        "s3://bucket/some/prefix/?endpoint=https://host:9000/&region=r&ttl=7d&secret_file=/run/s3"
    )
    assert url == RemoteUrl(
        "s3",
        bucket="bucket",
        prefix="some/prefix",
        endpoint="https://host:9000",
        region="r",
        ttl_s=7 * 86400.0,
        secret_file="/run/s3",
    )
    assert url.place == "s3://bucket/some/prefix"
    cluster = parse_remote("valkeys://host:7000,host2/kv?cluster=yes&user=u")
    assert cluster.hosts == (("host", 7000), ("host2", 6379))
    assert (cluster.cluster, cluster.user, cluster.prefix) == (True, "u", "kv")
    assert parse_remote("file:///mnt/shared/kv").bucket == "/mnt/shared/kv"
    assert parse_remote("valkey://[::1]:1/").hosts == (("::1", 1),)
    assert parse_remote("gs://bucket").place == "gs://bucket"
    assert parse_remote("az://container/p?account=name").account == "name"
    pool = parse_remote("mooncake://h/p?protocol=rdma&device=mlx5_0&insecure=yes")
    assert pool.hosts == (("h", 50051),)


@cases(
    ("url", "helps"),
    [
        ("s3://id:hidden@bucket", "secret_file"),
        ("valkey://:hidden@127.0.0.1", "secret_file"),
        ("s3://bucket?endpoint=https://id:hidden@host", "secret_file"),
        ("s3://bucket?secret_access_key=hidden", "secret_file"),
        ("valkeys://host?password=hidden", "secret_file"),
        ("s3://bucket?AWS_SECRET_ACCESS_KEY=hidden", "secret_file"),
        ("s3://bucket?endpoint=http://10.0.0.1", "insecure=yes"),
        ("s3://bucket?endpoint=http://host.example", "insecure=yes"),
        ("valkey://host", "valkeys://"),
        ("valkey://127.0.0.1,host?cluster=yes", "insecure=yes"),
        ("mooncake://127.0.0.1:50051", "insecure=yes"),
        ("s3://bucket?zone=a", "known:"),
        ("file:///tmp?region=r", "known: none"),
        ("s3://bucket?region=a&region=b", "once"),
        ("s3://", "bucket"),
        ("s3://bucket/a b", "prefix"),
        ("s3://bucket/../x", "prefix"),
        ("file://tmp", "three slashes"),
        ("file:///tmp/../etc", ".."),
        ("valkey://127.0.0.1:0", "host and port"),
        ("valkey://127.0.0.1:99999", "host and port"),
        ("valkey://127.0.0.1:1,127.0.0.1:2", "cluster=yes"),
        ("valkeys://host?key=/k", "cert"),
        ("s3://bucket?ttl=soon", "ttl"),
        ("s3://bucket?insecure=true", "yes nor no"),
        ("az://container", "account"),
        ("ftp://host", "scheme"),
        ("bucket", "scheme"),
        ("", "scheme"),
        ("s3://[", "URL"),
        ("s3://bucket#part", "fragment"),
    ],
)
def test_bad_urls_are_refused_with_help_and_without_secrets(url: str, helps: str) -> None:
    with pytest.raises(KVHearthError) as refused:
        parse_remote(url)
    assert refused.value.reason is Reason.CONFIG_INVALID
    assert helps in refused.value.message
    assert "hidden" not in refused.value.message


def test_plain_text_is_fine_here_or_where_it_is_asked_for() -> None:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert parse_remote(f"valkey://{host}:1").hosts[0][1] == 1
        assert parse_remote(f"s3://b?endpoint=http://{host}:1").bucket == "b"
    assert parse_remote("valkey://10.0.0.1?insecure=yes").insecure
