#!/bin/sh
# Runs targets of the Makefile one after another, benches with --quick, and prints one table of what
# became of them; `make test-all` calls it.
#
#   all.sh MAKE TARGET...
set -u
make=$1
shift
table=
failed=0
for target; do
  from=$(date +%s)
  case $target in
    bench-*) set -- BENCH_ARGS=--quick ;;
    *) set -- ;;
  esac
  if "$make" "$target" "$@"; then result=passed; else result=FAILED failed=1; fi
  table=$table$(printf '%-20s %s %6d s' "$target" "$result" $(($(date +%s) - from)))'
'
done
printf '\n%s' "$table"
exit $failed
