#!/bin/bash
# Makes an image with coding agents in it: Claude Code, Codex, opencode and Gemini CLI, on Debian 13 with its node 20.
#
#     examples/agents/image.sh [PACKAGE…]           as root; a few minutes the first time, nothing if the image is there
#
#     CRAB     how to call crab                     (crab)
#     IMAGE    name of the image                    (agents)
#     FOLDER   where npm installs on this machine   (~/.cache/crab/agents)
#
# The packages are installed by this machine's npm, whatever proxy, mirror or certificate it was told of; without npm here, by
# one in a sandbox with network `nat`. If FOLDER has a node_modules with them already, nothing is downloaded. What is in home/
# beside this file tells the programs that their model is behind the sandbox's door.
set -euo pipefail
CRAB=${CRAB:-crab} IMAGE=${IMAGE:-agents} FOLDER=${FOLDER:-${XDG_CACHE_HOME:-$HOME/.cache}/crab/agents}
PROGRAMS=(claude codex opencode gemini)
PACKAGES=("$@")
[ $# -gt 0 ] || PACKAGES=(@anthropic-ai/claude-code @openai/codex opencode-ai @google/gemini-cli)

say() { echo "image.sh: $*" >&2; }
there() { $CRAB image show "$1" >/dev/null 2>&1; }
there "$IMAGE" && exit 0

if [ ! -d "$FOLDER/node_modules" ] && ! command -v npm >/dev/null; then
    say "there is no npm on this machine: installing in a sandbox"
    there node-npm || $CRAB image add node-npm debian:trixie+nodejs,npm,ripgrep
    $CRAB image build node-agents --from node-npm -- npm install --global --no-fund --no-audit "${PACKAGES[@]}"
    base=node-agents
else
    base=node
    there node || $CRAB image add node debian:trixie+nodejs,ripgrep
    if [ ! -d "$FOLDER/node_modules" ]; then
        say "installing ${PACKAGES[*]} in $FOLDER"
        mkdir -p "$FOLDER"
        npm install --silent --no-fund --no-audit --prefix "$FOLDER" "${PACKAGES[@]}"
    fi
fi

box=agents-image-$$
$CRAB create $box --image $base --network none >/dev/null
trap '$CRAB rm --force $box >/dev/null' EXIT
say "making image $IMAGE"
if [ $base = node ]; then
    $CRAB exec $box -- mkdir -p /opt/agents
    $CRAB cp "$FOLDER/node_modules" $box:/opt/agents/ >/dev/null
    $CRAB exec $box -- sh -ec '
        cd /opt/agents/node_modules
        rm -rf opencode-linux-*                     # opencode-ai has the one that fits
        for program; do
            [ ! -e .bin/$program ] || ln -sfn "$(readlink -f .bin/$program)" /usr/local/bin/$program
        done' sh "${PROGRAMS[@]}"
fi
$CRAB exec $box -- mkdir -p /work
for part in "$(dirname "$0")"/home/.[a-z]*; do
    $CRAB cp "$part" $box:/root/ >/dev/null
done
$CRAB commit $box "$IMAGE" >/dev/null
say "image $IMAGE is there"
