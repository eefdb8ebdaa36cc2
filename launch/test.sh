#!/usr/bin/env bash
# Set everything up and run the tests. Arguments go to pytest: bash launch/test.sh tests/unit -k cli
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup test
cd "$root"
exec "$python" -m pytest "$@"
