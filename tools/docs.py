"""Build and check the docs site without Quarto: python tools/docs.py, then open _local/_docs/index.html.

The published site is Quarto's (.github/workflows/docs.yml). This one is made from the same `_quarto.yml` and the same
processed pages by smalldocs, which is plain Python, so that broken links and pages are found where Quarto is not installed."""
import re
import shutil
import subprocess
import sys
import warnings

from nbdev.config import get_config, nbpath2html
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs

TEXT = ('.ipynb', '.yml', '.qmd')
warnings.filterwarnings('ignore', 'Found cells containing imports')   # a page that cannot be made says so by itself


def adapt(text, site, pages):
    "One file of the site as smalldocs wants it: pages by their published names, links to this build."
    text = text.replace(site + '/', '')
    for old, new in pages.items(): text = text.replace(old, new)
    text = re.sub(r'output-file: \w+\.html\\n', '', text)       # Quarto's word for the name that the page now has
    return text.split('\nformat-links:')[0]                     # nbdev.yml ends with a key that only Quarto knows


def build(cfg):
    "Copy the processed pages to _local under their published names."
    refresh_quarto_yml()
    src, dst = proc_nbs(), cfg.config_path/'_local'
    shutil.rmtree(dst, ignore_errors=True)
    shutil.copytree(src, dst)
    pages = {p.name: nbpath2html(p.name).with_suffix('.ipynb').name for p in dst.glob('*.ipynb')}
    for old, new in pages.items(): (dst/old).rename(dst/new)
    for p in dst.iterdir():
        if p.suffix in TEXT: p.write_text(adapt(p.read_text(), cfg.doc_url.rstrip('/'), pages))
    return dst


def main():
    "Build, check and render; the exit status is that of the first step that fails."
    site = build(get_config())
    for step in ('check', 'render'):
        if status := subprocess.call(['smalldocs', step, site]): sys.exit(status)


if __name__ == '__main__': main()   # proc_nbs starts processes, which import this file again
