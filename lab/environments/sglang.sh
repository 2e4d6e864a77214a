#!/bin/sh
# SGLang for `make test-sglang`: a small environment above two others.
#
#   sglang.sh ENVIRONMENT ENGINES PROJECT
#
# ENVIRONMENT: where it goes. ENGINES: the environment of `make test-engines`, for torch and what
# SGLang shares with vLLM. PROJECT: the project's own, for pytest and the daemon. It sees both behind
# its own packages. The variable PYTHON may name the interpreter.
set -eu
environment=$1
here=$(dirname "$0")

purelib() {
  "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

test -x "$environment/bin/python" || "${PYTHON:-python3}" -m venv "$environment"
above=$(purelib "$environment")
rm -f "$above/below.pth"
"$environment/bin/python" -m pip --disable-pip-version-check -q install --no-deps -r "$here/sglang.txt" -e "$here/../.."
cp "$here/sglang_stubs.py" "$above/"
for below in "$2" "$3"; do
  echo "import site; site.addsitedir('$(purelib "$below")')"
done > "$above/below.pth"
echo 'import sglang_stubs' >> "$above/below.pth"
"$environment/bin/python" -c 'import sglang.srt.managers.cache_controller'
