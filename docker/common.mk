# What the Makefile of the repository and that of a project made from it share.
# PYTHON, DEVICE=cpu|gpu, WHEELHOUSE: see docker/install-horovod.sh.
PYTHON ?= python3
# The folder of uv.lock.
LOCKED_IN ?= .
# All GPUs of this host, or those of CUDA_VISIBLE_DEVICES; without one, two ranks.
GPUS = found=$$(timeout 20 nvidia-smi -L 2>/dev/null | grep -c '^GPU'); \
	if [ "$$found" = 0 ] || [ -z "$${CUDA_VISIBLE_DEVICES+x}" ]; then echo "$$found"; \
	else echo "$$CUDA_VISIBLE_DEVICES" | tr , '\n' | grep -cv '^-1$$\|^NoDevFiles$$\|^$$'; fi
NP ?= $(or $(filter-out 0,$(shell $(GPUS))),2)
# Where .venv leads to: a set-up elsewhere may switch it in mid-run.
IN_VENV = PATH="$$(readlink -f "$(CURDIR)/.venv")/bin:$$PATH"
# A run that make starts is asked to stop when make ends, however make is ended.
TIED = $(shell setpriv --pdeathsig TERM true 2>/dev/null && echo setpriv --pdeathsig TERM)
export PYTHON DEVICE WHEELHOUSE

# Open MPI will not run as root unless told twice, nor more ranks than cores unless told.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif
export OMPI_MCA_rmaps_base_oversubscribe ?= 1

.PHONY: help setup lock audit wheelhouse image

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' docker/common.mk $(filter-out %common.mk,$(MAKEFILE_LIST))

setup: ## .venv with TensorFlow and Horovod; does nothing when it is up to date
	@docker/install-horovod.sh --venv .venv

lock: ## uv.lock anew, after a change of requirements*.txt
	@docker/install-horovod.sh --lock

audit: setup ## known vulnerabilities in uv.lock, but for two of Horovod in code that is not used here
	@cd $(LOCKED_IN) && $(IN_VENV) uv audit --frozen \
		--preview-features audit-command --ignore CVE-2024-10190 --ignore CVE-2026-31234 $(ARGS)

wheelhouse: ## all that set-up downloads, into WHEELHOUSE=wheelhouse; then make setup WHEELHOUSE=...
	@docker/install-horovod.sh --wheelhouse "$(or $(WHEELHOUSE),wheelhouse)"

image: ## the image for clusters; DEVICE=cpu for one without CUDA, see docker/build.sh
	@docker/build.sh
