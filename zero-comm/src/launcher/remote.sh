# Runs one rank on another machine. Variables and the command ("$@") are set before this; all of it is one
# compound command, so that nothing of what follows on standard input is taken for script.
#
# Standard input brings a name of a signal per line, for the rank's process group, and its end is the end of
# the rank. Lines with the mark on standard error are for the launcher.

exec 3<&0 4>&2 </dev/null 2>/dev/null
zr_say() { printf '%s %s\n' "$zr_mark" "$*" >&4; }
zr_refuse() { zr_say refused "$@"; exit; }

unset $(env | sed -nE "s/$zr_foreign.*/\\1/p")
cd -- "$zr_folder" || zr_refuse 126 "there is no folder $zr_folder"
command -v setsid >/dev/null || zr_refuse 127 "the program setsid is missing"
command -v -- "$1" >/dev/null || zr_refuse 127 "there is no program $1"
zr_private=$(mktemp -d) || zr_refuse 126 "no temporary folder can be made"
zr_group=$zr_private/group
export ZERO_LAST_WORDS="$zr_private/last-words"

# `kill` understands this form in every shell.
zr_signal() { kill "-$1" "-$(cat "$zr_group")"; }
# Not by a signal: what has ended and has nobody to wait for it would count.
zr_is_alive() {
    sed -n "s/.*) \([A-Z]\) [0-9]* $(cat "$zr_group") .*/\1/p" /proc/[0-9]*/stat | grep -qv '[ZX]'
}
zr_kills() { sed -n 's/^oom_kill //p' /proc/vmstat; }
zr_before=$(zr_kills)

(
    zr_started() { until [ -s "$zr_group" ]; do sleep 1; done; }
    while read -r zr_name <&3; do
        zr_started
        case $zr_name in USR*) ;; *) : >"$zr_private/asked" ;; esac
        zr_signal "$zr_name"
    done
    zr_started
    : >"$zr_private/killed"
    zr_signal KILL
) >/dev/null 4>&- &
zr_reader=$!
zr_say ready

# In the foreground: what a shell starts in the background ignores SIGINT. The group has its own number as
# soon as its leader can write it down. Redirected outside of the subshell, this shell would complain there
# about how the rank ended.
(exec setsid sh -c 'echo "$$" >"$0" && exec "$@"' "$zr_group" "$@" 2>&4 3<&- 4>&-)
zr_status=$?

# What the rank has left behind.
if [ -s "$zr_group" ] && [ ! -e "$zr_private/killed" ] && zr_is_alive; then
    [ -e "$zr_private/asked" ] || zr_signal TERM
    while [ "$zr_grace" -gt 0 ] && zr_is_alive; do
        sleep 1
        zr_grace=$((zr_grace - 1))
    done
    zr_signal KILL
fi
kill "$zr_reader"

zr_memory=enough
[ "$(zr_kills)" = "$zr_before" ] || zr_memory=out
zr_words=$(head -c "$zr_max" "$ZERO_LAST_WORDS" | tr -d '\r\n')
rm -rf -- "$zr_private"
zr_say ended "$zr_status" "$zr_memory" "$zr_words"
exit 0
