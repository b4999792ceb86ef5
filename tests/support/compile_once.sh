#!/bin/sh
# cc, which keeps what it makes beside this file: every process of a run compiles the same two files of C.
for word; do
  case $before in -o) target=$word ;; esac
  case $word in *.c) source=$word ;; esac
  before=$word
done
[ -f "$source" ] && [ -n "$target" ] || exec cc "$@"
key=$(for word; do [ "$word" = "$target" ] || echo "$word"; done | cat - "$(dirname "$source")"/*.[ch] | md5sum)
kept=$(dirname "$0")/${key%% *}.so
if [ ! -f "$kept" ]; then
  cc "$@" || exit
  cp "$target" "$kept.$$" && mv "$kept.$$" "$kept"
fi
cp "$kept" "$target"
