# make, make help: what there is.
LOCKED_IN = template
include docker/common.mk
TORCH ?= .cache/peers/bin/python

.PHONY: train test slow-test lint bench reproduce bits chaos soak fuzz docs fork image-test

train: setup ## the demo on all GPUs, else on two ranks; NP=4, ARGS=--num_steps=200
	@cd template && $(IN_VENV) exec $(TIED) ../launch/hosts.sh --plain -np $(NP) python train.py \
		--flagfile=configs/demo.cfg $(ARGS)

# A test with a time limit may fail because the file beside it took its core.
test: setup ## all tests, two files at a time, and the twenty slowest; what fails runs once more, alone; ARGS='-k sampler'
	@$(IN_VENV) pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20 $(ARGS) || \
		{ [ $$? = 1 ] && $(IN_VENV) pytest --last-failed --maxfail=3 $(ARGS); }

slow-test: setup ## what make test leaves out: set-ups of every kind, forks' own tests; 80 minutes
	@$(IN_VENV) pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow $(ARGS) || \
		{ [ $$? = 1 ] && $(IN_VENV) pytest --last-failed --maxfail=3 -m slow $(ARGS); }

fuzz: setup ## 200,000 inputs to all parsers of foreign bytes; 15 minutes
	@$(IN_VENV) FUZZ_INPUTS=200000 pytest -q -n 2 --timeout=3600 tests/attacks/test_fuzz.py $(ARGS)

chaos: setup ## each of 53 faults once, on three hosts: the run ends with the same bits; root; over an hour
	@$(IN_VENV) python tests/chaos.py $(ARGS)

soak: setup ## the same for two hours, a fault a minute; ARGS='--seed=2'
	@$(IN_VENV) python tests/chaos.py --events=120 --every=60 --minutes=120 $(ARGS)

lint: setup ## Python, types, shell, Dockerfile, spelling, links, imports between rooms
	@$(IN_VENV) ruff check && $(IN_VENV) ruff format --check
	@git ls-files '*.sh' '*.sbatch' .ci/run | $(IN_VENV) xargs shellcheck
	@git ls-files | grep -v '\.lock$$\|\.png$$' | $(IN_VENV) xargs codespell
	@$(IN_VENV) hadolint Dockerfile
	@$(IN_VENV) lint-imports --no-cache
	@$(IN_VENV) mypy
	@$(IN_VENV) python tests/helpers/links.py

bench: setup $(if $(filter .cache/%,$(TORCH)),.cache/peers/installed) ## benchmarks/RESULTS.md anew: equivalence, peers, operations, input, cost; 50 minutes
	@$(IN_VENV) python benchmarks/results.py $(TORCH:%=--torch=%) $(ARGS)

# PyTorch, which nothing here runs on, stays out of .venv.
.cache/peers/installed: benchmarks/requirements-peers.txt
	@$(IN_VENV) python -m venv --clear .cache/peers
	@.cache/peers/bin/python -m pip install -q -r $<
	@touch $@

reproduce: setup .cache/reproduce/installed ## published figures again, three seeds on 1 and 2 ranks: published, ours, difference
	@$(IN_VENV) python benchmarks/reproduce.py $(ARGS)

# Fashion-MNIST is Debian's package dataset-fashion-mnist, which Ubuntu has too.
.cache/reproduce/installed: benchmarks/requirements-reproduce.txt benchmarks/fashion-mnist.sha256
	@$(IN_VENV) python -m pip install -q --no-deps --upgrade --require-hashes --target .cache/reproduce -r $<
	@cd .cache/reproduce && apt-get -qq download dataset-fashion-mnist && dpkg-deb --extract dataset-fashion-mnist_*.deb .
	@cd .cache/reproduce && sha256sum --check --quiet ../../benchmarks/fashion-mnist.sha256
	@touch $@

bits: setup ## the same bits on any number of ranks, five runs in eight ways; 15 minutes
	@$(IN_VENV) python benchmarks/bits.py $(ARGS)

docs: setup ## docs/ as a site in site/, with the API; a link that leads nowhere fails
	@$(IN_VENV) mkdocs build --quiet --strict

fork: setup ## a project of your own, NAME=../my-model; asks five questions, ARGS=--defaults: none
	@[ -n "$$NAME" ] || { echo 'error: where to? make fork NAME=../my-model' >&2; exit 2; }
	@$(IN_VENV) python fork.py "$$NAME" $(ARGS)

image-test: setup ## builds the CPU image (IMAGE_DEVICE=gpu: the other) on Debian, trains in it; root, buildah, 25 minutes
	@$(IN_VENV) pytest -s $(ARGS) tests/helpers/image_build.py
