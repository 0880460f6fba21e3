# Every target makes what it needs; a second call is quick. `make demo` and `make test` are all a newcomer needs.
PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
READY := $(VENV)/.ready
BENCH_READY := $(BENCH_VENV)/.ready
TRAINERS_VENV := .venv-trainers
TRAINERS_READY := $(TRAINERS_VENV)/.ready
# Every test file that needs a package of tests/files/trainers.txt; tests/test_project.py compares.
TRAINER_TESTS := tests/files/test_trainers.py tests/files/test_stable_baselines3.py tests/storage/test_adapter_rsl_rl.py \
	tests/storage/test_adapter_fast_td3.py tests/storage/test_adapter_torchrl.py tests/storage/test_device_rollouts.py tests/buffers/test_small_parts.py tests/storage/test_described_names.py tests/test_documents.py
INPUTS := setup.cfg pyproject.toml constraints.txt tests/remote/s3.txt
# Systems whose own classes read our files; tests/readers/NAME.txt lists the packages to install.
READERS := minari robomimic lerobot_v21 lerobot_v30
SOAK_S ?= 1800
NAMES ?=

.PHONY: demo test test-gpu test-ray test-trainers test-readers lint docs bench soak fuzz clean help

help:
	@echo "make demo    learn, record, stream, clone: the whole library in one to two minutes (open demo/report.html first)"
	@echo "make test    all tests; those of the report page skip without a browser, on Debian:"
	@echo "             apt-get install --no-install-recommends chromium fonts-dejavu-core"
	@echo "make test-gpu  the tests marked gpu, on a CUDA device where there is one, else on the pretended one"
	@echo "make test-ray  install Ray (500 MB) and run the tests that need it; make test skips them without it"
	@echo "make test-trainers  the tests that need rsl_rl, tensordict, stable-baselines3, accelerate or Lightning"
	@echo "make test-readers  the classes of other systems read our files: $(READERS), each in an environment of its own"
	@echo "make lint    ruff and mypy"
	@echo "make docs    build the site of README, guides and docstrings in out/site"
	@echo "make bench   all benchmarks against the limit and the installable peers (NAMES='playback record' for some)"
	@echo "make soak    the long tests: kill -9, flipped bits, two collectors and two learners for SOAK_S=$(SOAK_S) seconds"
	@echo "make fuzz    the property tests with many more examples, and all combinations of parameters"
	@echo "make clean   remove the environments and everything generated"

# The packages of the S3 tests ask for an older python-dateutil than is pinned, and run with it: hence --no-deps.
# The stamp is written last, so an interrupted installation is taken up again.
$(READY): $(INPUTS)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[codecs,demo,fast,formats,plot,remote,report,test,video,zarr]"
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps -r tests/remote/s3.txt \
		|| echo "the tests against a local S3 server will be skipped"
	@touch $@

# Peers have wishes of their own about other packages, so they live apart and one by one.
$(BENCH_READY): $(INPUTS) benchmarks/peers.py
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo,fast,plot]"
	$(BENCH_VENV)/bin/python benchmarks/peers.py install
	@touch $@

# It sees the packages of $(VENV), which stay as they are: types and other tests do not depend on trainers.
$(TRAINERS_READY): $(READY) tests/files/trainers.txt
	$(VENV)/bin/python -m venv $(TRAINERS_VENV)
	$(VENV)/bin/python tests/readers/on_top.py $(TRAINERS_VENV)
	$(TRAINERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/files/trainers.txt
	@touch $@

demo: $(READY)
	$(VENV)/bin/python examples/record_stream_learn.py

# Three processes for two cores, as many tests wait for the disk or for others; one thread in each.
test: $(READY)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $$(( $$(getconf _NPROCESSORS_ONLN) * 3 / 2 ))

# Where torch finds a CUDA device, the tests of calls without waits run with its sync debug mode at "error".
test-gpu: $(READY)
	$(VENV)/bin/python -m pytest -m gpu

# Apart: Ray is large, and its actors start for a minute or two.
test-ray: $(READY)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[ray]"
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/ray_actors

# Apart as well: some of these tests start two ranks. Without a package they would skip, hence the import.
test-trainers: $(TRAINERS_READY)
	$(TRAINERS_VENV)/bin/python -c "import accelerate, lightning, rsl_rl, stable_baselines3, tensordict"
	OMP_NUM_THREADS=1 $(TRAINERS_VENV)/bin/python -m pytest $(TRAINER_TESTS)

# Each asks for packages and versions of its own, and for more than reading needs: a small environment on top of .venv.
.venv-readers-%/.ready: tests/readers/%.txt constraints.txt $(READY)
	$(VENV)/bin/python -m venv .venv-readers-$*
	$(VENV)/bin/python tests/readers/on_top.py .venv-readers-$*
	.venv-readers-$*/bin/python -m pip install --quiet --disable-pip-version-check $(if $(filter lerobot%,$*),,-c constraints.txt) --no-deps -r $<
	@touch $@

test-readers: $(READERS:%=.venv-readers-%/.ready)
	set -e; for reader in $(READERS); do \
		OMP_NUM_THREADS=1 .venv-readers-$$reader/bin/python -m pytest tests/readers/test_$$reader.py; \
	done

lint: $(READY)
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy

docs: $(READY)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet

bench: $(BENCH_READY)
	$(BENCH_VENV)/bin/python -m benchmarks $(NAMES)

soak: $(READY)
	SOAK_S=$(SOAK_S) $(VENV)/bin/python -m pytest -m soak --timeout=0 -s

fuzz: $(READY)
	$(VENV)/bin/python -m pytest -m "hypothesis or each_value or thorough" --hypothesis-profile=fuzz --timeout=0

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(TRAINERS_VENV) .venv-readers-* out demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
