#!/bin/sh
# An environment for a peer of `make bench-peers`.
#
#   install.sh ENVIRONMENT PEER TORCH
#
# ENVIRONMENT: where it goes. PEER: lmcache, mooncake or redis, the name of a list beside this file. TORCH:
# the torch that lmcache gets, as pip calls it. The variable PYTHON may name the interpreter.
#
# A peer that cannot be had is no error: ENVIRONMENT/not-installed then says why in its last line,
# and the benchmark reports that. The next call tries again.
set -u
environment=$1
peer=$2
torch=$3
here=$(dirname "$0")
note=$environment/not-installed
log=$environment/install.log

fail() {
  { echo "$1"; grep -i error "$log" | tail -n 1; } | paste -sd' ' - > "$note.new"
  mv "$note.new" "$note"
  echo "$peer: skipped: $(cat "$note")" >&2
  exit 0
}

mkdir -p "$environment"
rm -f "$note" "$environment/.ready"
: > "$log"
test -x "$environment/bin/python" || "${PYTHON:-python3}" -m venv "$environment" >> "$log" 2>&1 ||
  fail 'no virtual environment can be made:'
pip() {
  "$environment/bin/python" -m pip --disable-pip-version-check -q "$@" >> "$log" 2>&1
}

if [ "$peer" = lmcache ]; then
  pip install "$torch" || fail "pip cannot install $torch:"
fi
pip install --no-deps -r "$here/$peer.txt" || fail "pip cannot install $peer.txt:"

# The wheel of mooncake is linked against a library of RDMA, also where no RDMA is used. Packages are
# unpacked into the environment; nothing is installed into the system.
if [ "$peer" = mooncake ] && ! "$environment/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>> "$log"; then
  syslibs=$environment/syslibs
  mkdir -p "$syslibs"
  (
    cd "$syslibs" && apt-get download libibverbs1 libnl-3-200 libnl-route-3-200 &&
      for package in *.deb; do dpkg -x "$package" . || exit 1; done
  ) >> "$log" 2>&1 || fail 'libibverbs.so.1 is missing (Debian: libibverbs1):'
fi

# Debian's server, unpacked beside its client for Python; nothing is installed into the system.
if [ "$peer" = redis ] && ! test -x /usr/bin/redis-server; then
  syslibs=$environment/syslibs
  mkdir -p "$syslibs"
  (
    cd "$syslibs" && apt-get download redis-server redis-tools libjemalloc2 liblzf1 liblua5.1-0 lua-bitop lua-cjson libhiredis0.14 &&
      for package in *.deb; do dpkg -x "$package" . || exit 1; done
  ) >> "$log" 2>&1 || fail "Debian's redis-server cannot be had:"
fi
touch "$environment/.ready"
