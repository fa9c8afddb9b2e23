# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Pyxis: Slurm starts the container; one that cannot is named as such.

# in_container IMAGE MOUNTS [FOLDER]: `container` is the words of srun for a step inside it. MOUNTS end
# in a comma. The working folder, the run's and the job's are seen inside under their own names. Pyxis
# passes the environment in. Source: github.com/NVIDIA/pyxis, wiki, Usage.
in_container() {
  local mounts="$2$PWD:$PWD,$FSDPPLAN_RUN_FOLDER:$FSDPPLAN_RUN_FOLDER${3:+,$3:$3}"
  container=(--container-image="$1" --container-workdir="$PWD" --container-mounts="$mounts")
}

# What srun itself says of an option that a plugin would bring helps nobody.
require_pyxis() {
  local said="srun has no --container-image here, so pyxis is missing: have it installed, or emit"
  [ "$code" != 0 ] && [[ "$(srun --help 2>/dev/null)" != *--container-image* ]] || return 0
  code=5
  give_up "$said with --container-runtime apptainer"
}
