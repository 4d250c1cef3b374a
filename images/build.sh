#!/usr/bin/env bash
# Build both images: build.sh VERSION REVISION. The environment may name BASE, the base image, NAME, how the images'
# names begin, and WHEELHOUSE, a folder of wheels to install from; with one the build has no network at all.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1 revision=$2 docker=${DOCKER:-docker} name=${NAME:-csc}
arguments=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision")
base=${BASE:-python:3.11-slim}
arguments+=(--build-arg "BASE=$base")
[[ $base == *@sha256:* ]] || echo "note: $base is a tag, which may move; BASE=name@sha256:… is always the same" >&2
[[ -z ${PIP_INDEX_URL:-} ]] || arguments+=(--build-arg PIP_INDEX_URL)
if [[ -n ${WHEELHOUSE:-} ]]; then
  wheels=$name-wheelhouse:$version
  trap '$docker image rm --force "$wheels" >/dev/null' EXIT
  tar -C "$WHEELHOUSE" -c . | $docker import - "$wheels" >/dev/null
  arguments+=(--network none --build-arg PIP_NO_INDEX=1 --build-arg "WHEELHOUSE=$wheels")
fi
for image in cpu train; do
  DOCKER_BUILDKIT=1 $docker build --quiet "${arguments[@]}" --build-arg "KIND=$image" --file images/Dockerfile \
    --tag "$name-$image:$version" --tag "$name-$image:latest" . >/dev/null
  size=$($docker image inspect --format '{{.Size}}' "$name-$image:$version")
  echo "$name-$image:$version  $((size / 1000000)) MB"
done
