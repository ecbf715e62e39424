#!/usr/bin/env bash
# Makes sure that etcd, kube-apiserver, kube-controller-manager and kube-scheduler are there for
# `make test-k8s`, and prints the directory that holds them.
#
# KUBEBUILDER_ASSETS names a directory of ready binaries, of any version. Without it, Debian's
# source package `kubernetes` is built once into ~/.cache/taskd (about 7 minutes of CPU time). There
# is also a kubectl, newer than that: the test that follows the guide is skipped without one.
set -euo pipefail

version=1.20.2
programs=(etcd kube-apiserver kube-controller-manager kube-scheduler)
packages=(etcd-server golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev)
archive=/usr/share/keyrings/debian-archive-keyring.gpg

complete() { # directory
    local program
    for program in "${programs[@]}"; do
        [[ -x $1/$program ]] || return 1
    done
}

if [[ -n ${KUBEBUILDER_ASSETS:-} ]]; then
    complete "$KUBEBUILDER_ASSETS" && echo "$KUBEBUILDER_ASSETS" && exit 0
    echo "KUBEBUILDER_ASSETS=$KUBEBUILDER_ASSETS must hold: ${programs[*]}" >&2
    exit 1
fi

cache=${XDG_CACHE_HOME:-$HOME/.cache}/taskd/kubernetes-$version-3 # 3: of this script
mkdir -p "$cache"
exec 9>"$cache/.lock" # two runs at the same time build once
flock 9
complete "$cache/bin" && [[ -x $cache/bin/kubectl ]] && echo "$cache/bin" && exit 0

if ! command -v apt-get >/dev/null; then
    echo "cannot build Kubernetes without apt-get: set KUBEBUILDER_ASSETS" >&2
    exit 1
fi
build=$cache/build
rm -rf "$build"

# A source list of our own: the machine's is left alone, and no root is needed.
from() { # release, command and words of apt-get; in the current directory
    local release=$1 own=$build/$1 type
    shift
    mkdir -p "$own"/{lists/partial,cache/archives/partial}
    for type in deb deb-src; do
        echo "$type [signed-by=$archive] http://deb.debian.org/debian $release main"
    done >"$own/sources.list"
    local apt=(apt-get -qq -o "Dir::Etc::sourcelist=$own/sources.list"
        -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$own/lists"
        -o "Dir::Cache=$own/cache" -o Dir::State::status=/dev/null -o APT::Sandbox::User=)
    "${apt[@]}" update >&2
    local words
    for words in "$@"; do
        # shellcheck disable=SC2086
        "${apt[@]}" $words >&2
    done
}

get_kubectl() { # into which directory
    mkdir -p "$build/kubectl"
    (
        cd "$build/kubectl"
        from trixie "download kubectl"
        dpkg-deb --extract kubectl_*.deb .
        mv usr/bin/kubectl "$1/kubectl"
    ) || echo "there is no kubectl: the guide is not tested" >&2
}

if complete "$cache/bin"; then
    get_kubectl "$cache/bin"
    rm -rf "$build"
    echo "$cache/bin"
    exit 0
fi
echo "building Kubernetes $version into $cache/bin: about 7 minutes" >&2
mkdir -p "$build"/{source,bin}
cd "$build"
get_kubectl "$build/bin"
from bookworm "download ${packages[*]}" "source --download-only kubernetes"

# Unpacked, not installed: no root is needed, and no service is started.
for package in *.deb; do
    dpkg-deb --extract "$package" packages
done
cp packages/usr/bin/etcd bin/

tar -xzf kubernetes_*.orig.tar.gz -C source --strip-components=1
# The source has reflect2 1.0.1, which crashes with Go 1.18 and later as soon as a custom resource
# has labels. Debian's package is 1.0.2, where that is fixed.
reflect2=github.com/modern-go/reflect2
rm source/vendor/$reflect2/*.go source/vendor/$reflect2/*.s
cp packages/usr/share/gocode/src/$reflect2/*.{go,s} source/vendor/$reflect2/
mkdir -p gopath/src/k8s.io
ln -s "$build/source" gopath/src/k8s.io/kubernetes
cd gopath/src/k8s.io/kubernetes
export GOPATH=$build/gopath GOCACHE=$build/gocache GO111MODULE=off CGO_ENABLED=0
export GOFLAGS=-tags=providerless GOROOT=$build/packages/usr/lib/go-1.19
export PATH=$GOROOT/bin:$PATH
export GOGC=400 # the compiler spends a fifth of its time on garbage otherwise

# All generated code is in the source except the description of the API, which apply needs. Its own
# Makefile would generate everything again.
go build -o "$build/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen >&2
described=$(find -L pkg vendor/k8s.io -name '*.go' -print0 |
    xargs -0 grep --files-with-matches '+k8s:openapi-gen=' | xargs -n1 dirname | sort -u |
    grep -Ev 'code-generator|sample-apiserver' | sed 's|^|k8s.io/kubernetes/|' | paste -sd,)
"$build/openapi-gen" --logtostderr --input-dirs "$described" \
    --output-package k8s.io/kubernetes/pkg/generated/openapi \
    --output-file-base zz_generated.openapi --report-filename "$build/violations" \
    --go-header-file vendor/k8s.io/code-generator/hack/boilerplate.go.txt >&2

go build -o "$build/bin/" \
    -ldflags "-s -w -X k8s.io/kubernetes/vendor/k8s.io/component-base/version.gitVersion=v$version" \
    ./cmd/kube-apiserver ./cmd/kube-controller-manager ./cmd/kube-scheduler >&2
rm -rf "$cache/bin"
mv "$build/bin" "$cache/bin"
rm -rf "$build"
echo "$cache/bin"
