#!/usr/bin/env bash
# Installs what building and testing needs, on Debian 12 and other Debian or Ubuntu releases that have the packages.
#
#   deploy/install-deps.sh [--dev] [--plots] [--mpi] [--see] [--python [--venv=FOLDER]]
#
#   --dev      also clang, clang-format and clang-tidy, for the analysis that `tests/run.sh --all` does
#   --plots    also what reports are written with, Jinja2, Matplotlib, pandas and SciPy, for deploy/compare.sh and
#              deploy/experiments.sh
#   --mpi      also Open MPI, the baseline of ps_bench and of deploy/experiments.sh links; build after it
#   --see      also Prometheus and Chromium, with which `tests/run.sh --see` looks at metrics and the page. (Under systemd,
#              Debian's package starts a Prometheus on port 9090: systemctl disable --now prometheus)
#   --python   also what building the Python package needs
#   --venv     makes a virtual environment there, with what the package's tests need but PyTorch; with --see also with what
#              the tests of page and metrics need
#
# Needs root or sudo, and only if something is missing. Safe to run again. Exit status: 0 all is there, 1 failed, 2 bad
# usage.
set -euo pipefail

readonly LOCK_TIMEOUT_S=300      # For another package manager to finish.
readonly INSTALL_TIMEOUT_S=1800  # For one call of apt-get.

# ocl-icd-opencl-dev: the CMake file of Debian's libdnnl-dev looks for OpenCL, on which the package does not depend.
required=(build-essential cmake ninja-build pkg-config git ca-certificates
  protobuf-compiler protobuf-compiler-grpc libgrpc++-dev libprotobuf-dev libabsl-dev
  catch2 libdnnl-dev ocl-icd-opencl-dev libspdlog-dev nlohmann-json3-dev libxxhash-dev zlib1g-dev libisal-dev python3
  libmicrohttpd-dev prometheus-cpp-dev libjs-chart.js)
# Optional data and tools: the project builds without them, and a release may lack them.
optional=(dataset-fashion-mnist python3-grpcio python3-protobuf python3-numpy ccache iproute2 iptables strace)

venv= see=false
for argument in "$@"; do
  case "$argument" in
    --dev) optional+=(clang clang-format clang-tidy) ;;
    --plots) required+=(python3-jinja2 python3-matplotlib python3-pandas python3-scipy) ;;
    --mpi) optional+=(openmpi-bin libopenmpi-dev) ;;
    --see) see=true optional+=(chromium chromium-driver prometheus) ;;
    --python) required+=(python3-dev python3-venv) ;;
    --venv=?*) venv=${argument#--venv=} ;;
    -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *)
      echo "install-deps: unknown argument '$argument' (the options are --dev, --plots, --mpi, --see, --python and --venv=FOLDER)" >&2
      exit 2
      ;;
  esac
done

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  echo "install-deps: this is for Debian and Ubuntu; on this system, install the equivalents of: ${required[*]}" >&2
  exit 1
fi

# make_venv: the virtual environment, if one is asked for.
make_venv() {
  if [[ -z $venv ]]; then return; fi
  if [[ ! -x $venv/bin/python ]]; then /usr/bin/python3 -m venv "$venv"; fi
  local packages=('nanobind>=3.1,<4' nanobind-backend pytest pytest-xdist numpy grpcio 'ruff==0.17.6' 'mypy==2.4.1')
  if $see; then packages+=('selenium>=4.20,<5' 'axe-core-python==0.1.0' tensorboard); fi
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
}

# missing PACKAGE...: those of them that are not installed, one a line.
missing() {
  local installed
  # dpkg-query fails when it does not know one of the names; the others are still listed.
  installed=$(dpkg-query -W -f='${Package} ${db:Status-Status}\n' "$@" 2>/dev/null |
    awk '$2 == "installed" {print $1}') || true
  printf '%s\n' "$@" | grep -vxF -f <(printf '%s\n' "$installed" | grep .) || true
}

mapfile -t wanted < <(missing "${required[@]}" "${optional[@]}")
if ((${#wanted[@]} == 0)); then
  echo "install-deps: all $((${#required[@]} + ${#optional[@]})) packages are installed"
  make_venv
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "install-deps: missing: ${wanted[*]}; run this as root, or install sudo" >&2
    exit 1
  fi
  as_root=(sudo)
  [[ -t 0 ]] || as_root=(sudo -n)  # Nobody could type a password.
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# apt ARGUMENT...: apt-get that asks nothing and waits for locks, but not forever. Output goes to the log.
apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout --kill-after=10 "$INSTALL_TIMEOUT_S" \
    apt-get -o "DPkg::Lock::Timeout=$LOCK_TIMEOUT_S" -o Acquire::Retries=3 -q -y "$@" >>"$log" 2>&1 </dev/null
}

# The lock on the package lists is not covered by DPkg::Lock::Timeout.
update_lists() {
  local deadline=$((SECONDS + LOCK_TIMEOUT_S))
  until apt update; do
    if [[ $(tail -n 5 "$log") != *'Could not get lock'* ]] || ((SECONDS >= deadline)); then return 1; fi
    sleep 2
  done
}

# has_candidate PACKAGE: whether this release offers it.
has_candidate() { [[ $(LC_ALL=C apt-cache policy "$1" 2>/dev/null) == *'Candidate: '[!\(]* ]]; }

# absent PACKAGE...: those of them that are wanted and not available, in one line.
absent() {
  local package names=()
  for package in "$@"; do
    if [[ " ${wanted[*]} " == *" $package "* ]] && ! has_candidate "$package"; then names+=("$package"); fi
  done
  echo "${names[*]}"
}

echo "install-deps: installing ${wanted[*]}" >&2
update_lists || echo "install-deps: the package lists could not be updated; trying with the existing ones" >&2

lacking=$(absent "${required[@]}")
if [[ -n $lacking ]]; then
  tail -n 5 "$log" >&2
  echo "install-deps: this system's package sources do not have: $lacking" >&2
  exit 1
fi
skipped=$(absent "${optional[@]}")
if [[ -n $skipped ]]; then
  mapfile -t wanted < <(printf '%s\n' "${wanted[@]}" | grep -vxF -f <(tr ' ' '\n' <<<"$skipped"))
fi

if ((${#wanted[@]} > 0)) && ! apt install --no-install-recommends "${wanted[@]}"; then
  tail -n 20 "$log" >&2
  echo "install-deps: apt-get install failed (last lines above)" >&2
  exit 1
fi
mapfile -t left < <(missing "${required[@]}")
if ((${#left[@]} > 0)); then
  echo "install-deps: apt-get succeeded, but these are still missing: ${left[*]}" >&2
  exit 1
fi
echo "install-deps: installed ${#wanted[@]} packages in $SECONDS s${skipped:+; not available here, skipped: $skipped}"
make_venv
