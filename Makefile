# Two commands are enough after a clone: `make book` and `make test`.
# Needs Python 3.11 to 3.14, named python3 or python3.x; another one: make book PYTHON=/path/to/python
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$p && break; done)
PORT  = 8000
TESTS = tests book

PY       = .venv/bin/python
READY    = .venv/.ready
BUILT    = _build/.built
PAGE     = _build/html/index.html
CHAPTERS = $(wildcard book/*.ipynb)
SOURCES  = _config.yml _toc.yml $(wildcard benchmarks/stored/*/result.json) $(shell find book -type f -not -path '*/.*' -not -path '*/__pycache__*')

# A file of tests, or a notebook, stays on one worker: its cells share a kernel.
# In their order: tests of the pages, the slowest, come first.
PARALLEL = -n logical --maxprocesses=4 --dist=loadfile --no-loadscope-reorder

# What only `make lab` needs; it installs them.
LAB_WITH = jupyterlab==4.6.6 jupyterlab-myst==2.7.0

.PHONY: book test notebooks experiments toy full bench serve lab pdf clean

book: $(BUILT)  ## build the site
	@echo "The book is at file://$(CURDIR)/$(PAGE) (or run: make serve)"

test: $(BUILT)  ## run every test, then every notebook against its stored outputs
	K3_SITE=_build/html OMP_NUM_THREADS=1 $(PY) -m pytest $(TESTS) $(PARALLEL) --nbval \
		--nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg --nbval-cell-timeout=120

notebooks: $(READY)  ## execute the chapters again and store their outputs
	$(PY) -m k3_teach.notebook.execute run $(CHAPTERS)

experiments: $(READY)  ## run the longer experiments again and store what they give (two hours)
	for script in book/experiments/*.py; do $(PY) $$script --output $${script%.py}.json || exit 1; done

toy: $(READY)  ## train the model that ships, and its draft, again (a quarter of an hour on one core)
	$(PY) -m k3_teach.train _build/toy --config k3_teach/toy/config.json --text library --bpe 2048 \
		--steps 750 --lr 0.01 --validate-every 50 --save-every 50 --threads 1 --ship k3_teach/toy
	$(PY) -m k3_teach.train _build/draft --config k3_teach/toy/draft/config.json --text library \
		--tokenizer k3_teach/toy --steps 750 --lr 0.01 --validate-every 50 --save-every 50 \
		--threads 1 --ship k3_teach/toy/draft

full: $(READY)  ## run all 93 layers at full width again and store the report (three minutes, idle machine, 8 GB)
	$(PY) -m k3_teach.scale.stream --virtual --prompt-tokens 8 --new-tokens 6 \
		--report benchmarks/stored/full-size/stream.json

bench: $(READY)  ## time the package beside the usual ways, one thread (ten minutes)
	$(PY) -m benchmarks --output _build/bench

serve: $(BUILT)  ## serve the site, build again what is edited, and reload the open page
	@echo "http://127.0.0.1:$(PORT)/ (stop with Ctrl-C)"
	@$(PY) tools/serve.py $(PORT)

lab: $(READY)  ## open the chapters in JupyterLab
	$(PY) -m pip install --quiet -c requirements.txt $(LAB_WITH)
	.venv/bin/jupyter trust $(CHAPTERS)
	.venv/bin/jupyter lab book

pdf: $(BUILT)  ## print the book to _build/book.pdf (needs a Chromium)
	$(PY) -m tools.pdf _build/html _build/book.pdf

clean:  ## remove what the other targets made
	rm -rf .venv _build .pytest_cache .hypothesis *.egg-info

$(READY): requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "This book needs Python 3.11 to 3.14; none was found. Install one, or name it: make book PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -r requirements.txt -e .
	@touch $@

$(BUILT): $(READY) $(SOURCES)
	rm -rf _build
	.venv/bin/jupyter-book build . -W -n --keep-going
	@touch $@
