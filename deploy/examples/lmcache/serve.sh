#!/bin/sh
# LMCache's daemon with KVHearth as its second level.
#
#   serve.sh REVISION [ARGUMENTS OF lmcache server]
#
# REVISION: name of the weights; empty for models in local directories. The variable KVHEARTH_URL
# may name the daemon.
set -eu
revision=$1
shift
exec lmcache server --l1-size-gb 8 --eviction-policy LRU --l2-adapter "$(cat << JSON
{"type": "plugin", "module_path": "kvhearth.connectors.lmcache", "class_name": "KVHearthL2Adapter",
 "adapter_params": {"revision": "$revision"}}
JSON
)" "$@"
