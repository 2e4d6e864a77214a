"""Renders or lints a chart with Helm's own library; run by the interpreter of ``.venv-tools``.

python helm_render.py CHART VALUES_JSON      # a JSON object: template: text
python helm_render.py CHART lint             # a JSON object: findings
"""

import json
import sys

import helm_python
from helm_python.chart import Chart, lint

chart, wanted = sys.argv[1:]
try:
    if wanted == "lint":
        found = lint(chart, strict=True)
    else:
        with Chart.load(chart) as loaded:
            found = loaded.render(values=json.loads(wanted), name="kvhearth")
except helm_python.HelmError as error:
    sys.exit(str(error))
print(json.dumps(found))
