#!/bin/sh
# Downloads the Debian packages the texts come from and unpacks them into the folder
# $1, without installing anything. Pictures, sounds and translations are left out.
set -eu
root=$(mkdir -p "$1" && cd "$1" && pwd)
debs=$root/debs
mkdir -p "$debs"
cd "$debs"
headers=$(apt-cache depends "$(apt-cache depends linux-headers-amd64 | awk '/Depends/ { print $2; exit }')" |
    awk '/common/ { print $2; exit }')
for package in bible-kjv bible-kjv-text r-cran-janeaustenr anarchism jargon-text dict-devil \
    libpython3.11-minimal libpython3.11-stdlib golang-1.19-src rust-src perl-modules-5.36 libruby3.1 "$headers" \
    python3.11-doc linux-doc-6.1 perl-doc vim-runtime git-doc nodejs-doc postgresql-doc-15 \
    debian-policy debian-handbook \
    endless-sky-data freedroidrpg-data naev-data flare-game fillets-ng-data renpy-demo renpy-thequestion \
    crossfire-maps \
    wesnoth-1.16-dm wesnoth-1.16-did wesnoth-1.16-dw wesnoth-1.16-ei wesnoth-1.16-httt wesnoth-1.16-l \
    wesnoth-1.16-low wesnoth-1.16-nr wesnoth-1.16-sof wesnoth-1.16-sota wesnoth-1.16-sotbe wesnoth-1.16-thot \
    wesnoth-1.16-trow wesnoth-1.16-tsg wesnoth-1.16-ttb wesnoth-1.16-utbs wesnoth-1.16-data
do
    ls "${package}"_*.deb >/dev/null 2>&1 || apt-get download -q "$package"
    dpkg-deb --fsys-tarfile "${package}"_*.deb | tar -x -C "$root" --exclude='*.png' --exclude='*.jpg' \
        --exclude='*.webp' --exclude='*.ogg' --exclude='*.wav' --exclude='*.mo' --exclude='*.svg'
done
# which versions they were: the table in models/README.md
ls "$debs" >"$root/versions.txt"
