# A peer from PyPI, in an environment of its own. Sourced after paths.sh.

# venv_install REQUIREMENT...   installs wheels; with pip_flags set, what they allow
venv_install() {
    [[ -x $home/venv/bin/python ]] || python3 -m venv "$home/venv"
    # shellcheck disable=SC2086 # pip_flags are words
    "$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check ${pip_flags---only-binary :all:} "$@"
}

# venv_run ADAPTER ARGUMENT...   becomes the adapter, so that no second process waits for it
venv_run() {
    need "$home/venv/bin/python"
    export PYTHONPATH=$common PYTHONDONTWRITEBYTECODE=1
    exec "$home/venv/bin/python" "$@"
}
