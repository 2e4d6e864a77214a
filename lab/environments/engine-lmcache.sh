#!/bin/sh
# LMCache for the engine of `make bench-ttft`: a small environment above the engines' own.
#
#   engine-lmcache.sh ENVIRONMENT ENGINES
#
# ENVIRONMENT: where it goes. ENGINES: the environment of `make test-engines`, which it sees behind
# its own packages. The variable PYTHON may name the interpreter.
#
# If LMCache cannot be had, that is no error: ENVIRONMENT/not-installed then says why in its last
# line, and the benchmark reports that. The next call tries again.
set -u
environment=$1
engines=$2
here=$(dirname "$0")
note=$environment/not-installed
log=$environment/install.log

fail() {
  { echo "$1"; grep -i error "$log" | tail -n 1; } | paste -sd' ' - > "$note.new"
  mv "$note.new" "$note"
  echo "lmcache: skipped: $(cat "$note")" >&2
  exit 0
}

mkdir -p "$environment"
rm -f "$note" "$environment/.ready"
: > "$log"
test -x "$environment/bin/python" || "${PYTHON:-python3}" -m venv "$environment" >> "$log" 2>&1 ||
  fail 'no virtual environment can be made:'
below=$("$engines/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') ||
  fail 'no environment of engines:'
above=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$below')" > "$above/engines.pth"
"$environment/bin/python" -m pip --disable-pip-version-check -q install --no-deps -r "$here/engine-lmcache.txt" >> "$log" 2>&1 ||
  fail 'pip cannot install engine-lmcache.txt:'
"$environment/bin/python" -c 'import lmcache.integration.vllm.vllm_multi_process_adapter' >> "$log" 2>&1 ||
  fail 'lmcache cannot be imported beside vLLM:'
touch "$environment/.ready"
