"""Rule by which a bucket drops old blocks, since nothing else evicts there."""

from __future__ import annotations

import json
import shlex

from kvhearth_server.tiers.remote.names import LAYOUT
from kvhearth_server.tiers.remote.url import RemoteUrl

_DAY_S = 86400.0
_DEFAULT_DAYS = 7


def lifecycle_rule(url: RemoteUrl) -> str:
    """Return a command that gives a bucket its rule; blocks live for the URL's ``ttl``, at least a
    day, or for a week.
    """
    days = max(round(url.ttl_s / _DAY_S), 1) if url.ttl_s else _DEFAULT_DAYS
    prefix = "/".join(filter(None, (url.prefix, LAYOUT))) + "/"
    if url.scheme == "gs":
        condition = {"age": days, "matchesPrefix": [prefix]}
        rule = json.dumps({"rule": [{"action": {"type": "Delete"}, "condition": condition}]})
        return (
            f"echo {shlex.quote(rule)} > rule.json && gcloud storage buckets update "
            f"gs://{url.bucket} --lifecycle-file=rule.json"
        )
    if url.scheme == "az":
        filters = {"blobTypes": ["blockBlob"], "prefixMatch": [f"{url.bucket}/{prefix}"]}
        actions = {"baseBlob": {"delete": {"daysAfterModificationGreaterThan": days}}}
        definition = {"actions": actions, "filters": filters}
        rule = json.dumps(
            {"rules": [{"name": "kvhearth", "type": "Lifecycle", "definition": definition}]}
        )
        return (
            f"az storage account management-policy create --account-name {url.account or 'NAME'} "
            f"--policy {shlex.quote(rule)}"
        )
    expiry = {
        "ID": "kvhearth",
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "Expiration": {"Days": days},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }
    place = f" --endpoint-url {shlex.quote(url.endpoint)}" if url.endpoint else ""
    rule = json.dumps({"Rules": [expiry]})
    return (
        f"aws s3api put-bucket-lifecycle-configuration --bucket {url.bucket}{place} "
        f"--lifecycle-configuration {shlex.quote(rule)}"
    )
