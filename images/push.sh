#!/usr/bin/env bash
# Push both images: push.sh VERSION REGISTRY FILE. Their digests go to FILE, as the part of a profile that names images.
set -euo pipefail
version=$1 registry=$2 file=$3 docker=${DOCKER:-docker} name=${NAME:-csc}
mkdir -p "$(dirname "$file")"
aside=$(mktemp "$file.XXXXXX")
trap 'rm -f "$aside"' EXIT
echo "images:" >"$aside"
for image in cpu train; do
  repository=$registry/$name-$image
  $docker tag "$name-$image:$version" "$repository:$version"
  $docker push --quiet "$repository:$version" >/dev/null
  digest=$($docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$repository:$version" |
    grep --max-count 1 --fixed-strings "$repository@")
  echo "  $image: $digest" | tee -a "$aside"
done
chmod 644 "$aside"
mv "$aside" "$file"
echo "in $file; put it into your profile"
