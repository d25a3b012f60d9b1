"README.md is nbs/index.ipynb as GitHub can read it. Run after changing the page: python tools/readme.py"
import re
import textwrap

from fastcore.nbio import read_nb
from nbdev.config import get_config

PAGE_LINK = re.compile(r'\]\((\d\d_\w+\.ipynb)')   # links between notebooks are relative to nbs/


def shown(output):
    "One output of a code cell as markdown; '' when it has no text."
    data = output.get('data', {})
    if 'text/markdown' in data: return ''.join(data['text/markdown'])
    return textwrap.indent(''.join(output.get('text') or data.get('text/plain', '')), ' ' * 4)


def cell_parts(cell):
    "The markdown of one cell, piece by piece."
    if 'hide' in cell.directives: return
    if cell.cell_type == 'markdown': yield cell.source
    if cell.cell_type != 'code': return
    if cell.directives.get('echo') != 'false': yield f'```python\n{cell.source}\n```'
    yield from map(shown, cell.outputs)


def readme(cfg):
    "The text of README.md."
    cells = read_nb(cfg.nbs_path/cfg.readme_nb).cells
    parts = [p.strip('\n') for c in cells for p in cell_parts(c)]
    note = f'<!-- Written by tools/readme.py from nbs/{cfg.readme_nb}: change the notebook. -->'
    return PAGE_LINK.sub(r'](nbs/\1', '\n\n'.join([note, *filter(None, parts)])) + '\n'


if __name__ == '__main__':
    cfg = get_config()
    (cfg.config_path/'README.md').write_text(readme(cfg))
