#!/usr/bin/env bash
# `pilotfish release` with a real systemd, its journal and HAProxy, by hand: sudo tests/support/check_systemd.sh PYTHON
#
# In namespaces of its own: nothing of the machine's /opt, /etc, /run or ports is touched. systemd runs as a user's
# manager, without what only a system's has: User=, Group=, StateDirectory=, CacheDirectory=, and the three settings whose
# mounts a container forbids. Everything else is as shipped. PYTHON has pilotfish's dependencies.
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
left_out='User|Group|StateDirectory|CacheDirectory|ProtectHome|ProtectKernelLogs|ProtectKernelTunables'

if [ "${2:-}" != inside ]; then
    python=$(realpath -s "${1:?want PYTHON}")
    exec unshare --mount --net --propagation private "$0" "$python" inside
fi

# -- a machine: Python and packages where ProtectHome and PrivateTmp would let them be seen ---------------------------
ip link set lo up
mkdir -p /srv/models /etc/pilotfish /var/{lib,cache}/pilotfish
for folder in /run /opt /etc/pilotfish /srv/models /var/{lib,cache}/pilotfish; do mount -t tmpfs tmpfs $folder; done
mkdir -p /run/systemd/system /run/haproxy /run/user /opt/{python,packages,bin,home} /srv/models/demo
chmod 700 /run/user
mount --bind "$("$1" -c 'import sys; print(sys.base_prefix)')" /opt/python
mount --bind "$("$1" -c 'import msgspec, pathlib; print(pathlib.Path(msgspec.__file__).parents[1])')" /opt/packages
cp -r "$root/demo/model/." /srv/models/demo

first=/opt/pilotfish/versions/first
/opt/python/bin/python3 -m venv --without-pip $first
site=$(echo $first/lib/python3*/site-packages)
echo /opt/packages >"$site/packages.pth"
mkdir "$site/pilotfish"
cp -r "$root"/pilotfish/* "$root"/{deploy,draft_heads,engine,kernels,metrics,server,spec} "$site/pilotfish"
printf '#!%s\nimport sys\nfrom pilotfish.server.cli import main\nsys.exit(main())\n' $first/bin/python >$first/bin/pilotfish
chmod +x $first/bin/pilotfish

version() { # NAME FLAGS
    mkdir -p "/opt/pilotfish/versions/$1"
    [ -e "/opt/pilotfish/versions/$1/bin" ] || ln -s ../first/bin "/opt/pilotfish/versions/$1/bin"
    flags="--max-model-len 2048 --num-threads 1 --served-model-name demo $2"
    printf 'PILOTFISH_MODEL=/srv/models/demo\nPILOTFISH_FLAGS=%s\n' "$flags" >"/opt/pilotfish/versions/$1/environment"
}
version first ""
version second "--num-speculative-tokens 5"
version broken "--no-such-flag"
echo PILOTFISH_PORT=8001 >/etc/pilotfish/one.env
echo PILOTFISH_PORT=8002 >/etc/pilotfish/two.env

export HOME=/opt/home XDG_RUNTIME_DIR=/run/user
mkdir -p $HOME/.config/systemd/user
grep -v -E "^($left_out)=" "$root/deploy/systemd/pilotfish@.service" >"$HOME/.config/systemd/user/pilotfish@.service"
printf '#!/bin/sh\nexec /usr/bin/systemctl --user "$@"\n' >/opt/bin/systemctl
chmod +x /opt/bin/systemctl
export PATH=/opt/bin:$PATH:/usr/sbin
/lib/systemd/systemd-journald 2>/dev/null &
/lib/systemd/systemd --user --log-level=err &
haproxy -db -f "$root/deploy/relay/haproxy.cfg" 2>/dev/null &
trap 'kill $(jobs -p)' EXIT
sleep 3

# -- what has to hold --------------------------------------------------------------------------------------------------
release() { # STATUS ARGUMENTS
    wanted=$1 came=0
    shift
    echo "+ pilotfish release $*"
    $first/bin/pilotfish release "$@" -- --only version --watch 1 || came=$?
    [ $came = "$wanted" ] || { echo "FAILED: exit status $came, want $wanted"; exit 1; }
}
expect() { # WHAT WANTED COMMAND...
    what=$1 wanted=$2
    shift 2
    came=$("$@" 2>&1 | tr '\n' ' ') || true
    [ "$came" = "$wanted " ] || { echo "FAILED: $what: want $wanted, got $came"; exit 1; }
    echo "ok: $what"
}
ask() { # TOKENS STREAM
    body="{\"prompt\": \"The sea\", \"max_tokens\": $1, \"ignore_eos\": true, \"stream\": $2}"
    curl --silent --no-buffer --fail localhost:8080/v1/completions --header 'content-type: application/json' --data "$body"
}
pid() { systemctl show --property MainPID --value "pilotfish@$1"; }
units=(pilotfish@one pilotfish@two)

release 0 first --steady 2
expect "a reboot would start the first" "enabled disabled" systemctl is-enabled "${units[@]}"
ask 8 false >/dev/null
sleep 1
expect "a line of JSON in the journal" 1 sh -c "journalctl -u pilotfish@one -o cat --no-pager | grep -c '\"status\":200'"

ask 1500 true >/opt/stream &
stream=$!
release 0 second --steady 2
wait $stream
expect "a stream that began before the switch is whole" "data: [DONE]" sh -c 'grep "\[DONE\]" /opt/stream'
expect "the second serves" "inactive active" systemctl is-active "${units[@]}"
expect "a reboot would start the second" "disabled enabled" systemctl is-enabled "${units[@]}"

release 1 broken --instead --steady 2
expect "the journal's words are in the record" 1 grep -c "unknown flag --no-such-flag" /opt/pilotfish/releases.jsonl
expect "the second serves again" "inactive active" systemctl is-active "${units[@]}"

(until systemctl is-active --quiet pilotfish@one; do sleep 0.2; done; sleep 15; kill -9 "$(pid one)") &
release 1 first --steady 60
expect "the second still serves" "inactive active" systemctl is-active "${units[@]}"

kill -9 "$(pid two)"
sleep 1
expect "killed, it waits" "activating" systemctl is-active pilotfish@two
sleep 12
expect "and is started again" "active" systemctl is-active pilotfish@two
echo "all held"
