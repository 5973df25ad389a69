#!/bin/sh
# Make src/knn_moe/pages/plot/ anew: the parts of Observable Plot that the pages use, as one script
# without a network, and the licences of what is in it. Needs npm and a registry.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
out="$here/src/knn_moe/pages/plot"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm init -y > npm.log
npm install --no-audit --no-fund @observablehq/plot@0.6.17 esbuild@0.28.2 >> npm.log 2>&1
node node_modules/esbuild/install.js
cat > entry.js <<'JS'
export { plot, barX, barY, cell, dot, gridX, gridY, link, lineY, raster, rect, ruleX, ruleY, text, tickX, tickY, tip, pointer, axisX, axisY, legend } from "@observablehq/plot";
JS
npx esbuild entry.js --bundle --minify --format=iife --global-name=Plot --target=es2020 \
  --legal-comments=none --metafile=meta.json --outfile="$out/plot.min.js"
node -e '
const fs = require("fs");
const inputs = Object.keys(JSON.parse(fs.readFileSync("meta.json")).inputs);
const names = inputs.map((path) => path.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)\//)).filter(Boolean);
const packages = [...new Set(names.map((found) => found[1]))].sort();
console.log("plot.min.js is made by scripts/bundle_plot.sh of these packages.\n");
for (const name of packages) {
  const { version, license } = JSON.parse(fs.readFileSync(`node_modules/${name}/package.json`));
  const file = fs.readdirSync(`node_modules/${name}`).find((one) => /^licen[sc]e/i.test(one));
  const text = file ? fs.readFileSync(`node_modules/${name}/${file}`, "utf8").trim() : "";
  console.log(`${name} ${version} (${license})\n\n${text}\n\n`);
}' > "$out/LICENSES.txt"
