/** The documents against the code: links lead somewhere, commands and flags exist, parameters have the names in model.md. */
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { dirname, join, relative } from 'node:path';
import { describe, expect, it } from 'vitest';
import { BENCHES, COMMANDS, DATA_COMMANDS, EVALUATIONS, EXPORTS, IMPORTS } from '../src/cli/commands.js';
import { configSchema } from '../src/config/schema.js';
import { ExitCode } from '../src/errors.js';
import { LanguageModel } from '../src/model/language-model.js';
import { modelShape } from '../src/model/shape.js';
import { cpu } from '../src/testing/devices.js';

const root = join(import.meta.dirname, '..');
const text = (name: string) => readFileSync(join(root, name), 'utf8');
const docs = readdirSync(join(root, 'docs'), { recursive: true, encoding: 'utf8' })
  .filter((name) => name.endsWith('.md'))
  .map((name) => join('docs', name));
const pages = [
  'README.md',
  'CONTRIBUTING.md',
  'CHANGELOG.md',
  'deploy/README.md',
  'bench/README.md',
  'dev/README.md',
  ...docs,
];

/** Text between backticks or inside a fenced block: where commands stand. */
function codeOf(page: string): string[] {
  const fenced = /^```[^\n]*\n([\s\S]*?)^```/gm;
  const blocks = [...page.matchAll(fenced)].map((match) => match[1]);
  const spans = [...page.replace(fenced, '').matchAll(/`([^`\n]+)`/g)].map((match) => match[1]);
  return [...blocks.flatMap((block) => block.split('\n')), ...spans];
}

/** How GitHub names the anchor of a heading. */
const anchorOf = (heading: string) =>
  heading
    .replace(/[`*]/g, '')
    .toLowerCase()
    .replace(/[^\p{L}\p{N} _-]/gu, '')
    .trim()
    .replace(/ /g, '-');

const anchors = (page: string) => [...page.matchAll(/^#+ (.+)$/gm)].map((match) => anchorOf(match[1]));

describe.each(pages)('%s', (name) => {
  const page = text(name);

  it('has relative links that lead to files and headings', () => {
    const outsideCode = page.replace(/^```[\s\S]*?^```/gm, '').replace(/`[^`\n]*`(?!\])/g, '');
    const links = [...outsideCode.matchAll(/\]\(([^)\s]+)\)/g)].map((match) => match[1]);
    const broken = links
      .filter((link) => !/^[a-z]+:/.test(link))
      .filter((link) => {
        const [file, anchor] = link.split('#');
        const target = file === '' ? name : relative(root, join(root, dirname(name), file));
        if (!existsSync(join(root, target))) return true;
        return anchor !== undefined && !anchors(text(target)).includes(anchor);
      });
    expect(broken).toEqual([]);
  });

  it('wraps its prose at 100 columns', () => {
    const prose = page.replace(/^```[\s\S]*?^```/gm, '').split('\n');
    const isProse = (line: string) => !/^\s*(\||#|<|!\[)/.test(line) && line.includes(' '); // no table, heading, HTML, image
    expect(prose.filter((line) => isProse(line) && line.length > 100)).toEqual([]);
  });

  it('names only files there are', () => {
    const paths = /^(?:src|test|docs|dev|bench|scripts|configs|examples|deploy)\/[\w./-]+$/;
    const spans = [...page.replace(/^```[\s\S]*?^```/gm, '').matchAll(/`([^`\n]+)`/g)].map((match) => match[1]);
    expect(spans.filter((span) => paths.test(span) && !existsSync(join(root, span)))).toEqual([]);
  });

  it('names only commands there are', () => {
    const known = new Set(COMMANDS.map((command) => command.name));
    const groups = new Map([
      ['bench', new Set(BENCHES.map((command) => command.name))],
      ['eval', new Set(EVALUATIONS.map((command) => command.name))],
      ['data', new Set(DATA_COMMANDS.map((command) => command.name))],
      ['import', new Set(IMPORTS.map((command) => command.name))],
      ['export', new Set(EXPORTS.map((command) => command.name))],
    ]);
    const unknown = codeOf(page).flatMap((line) => {
      const words = /^\s*(?:npx )?trefoil ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?/.exec(line);
      if (!words) return [];
      const [, command, second] = words;
      if (second && groups.get(command)?.has(second) === false) return [line];
      return known.has(command) ? [] : [line];
    });
    expect(unknown).toEqual([]);
  });

  it('names only npm scripts and shipped configs there are', () => {
    const { scripts } = JSON.parse(text('package.json')) as { scripts: Record<string, string> };
    const builtIn = ['ci', 'install', 'exec', 'init', 'pack', 'pkg', 'publish', 'run'];
    const wrong = codeOf(page).flatMap((line) => [
      ...[...line.matchAll(/npm (?:run )?([a-z:]+)/g)]
        .map((match) => match[1])
        .filter((script) => !(script in scripts) && !builtIn.includes(script))
        .map((script) => `npm ${script}`),
      ...[...line.matchAll(/--config ([a-z0-9_]+)(?![\w./])/g)]
        .map((match) => match[1])
        .filter((config) => !existsSync(join(root, 'configs', `${config}.yaml`)))
        .map((config) => `--config ${config}`),
    ]);
    expect(wrong).toEqual([]);
  });
});

it('README shows every folder of src', () => {
  const shown = [...text('README.md').matchAll(/^src\/([a-z]+)\//gm)].map((match) => match[1]);
  const folders = readdirSync(join(root, 'src'), { withFileTypes: true })
    .filter((entry) => entry.isDirectory())
    .map((entry) => entry.name);
  expect(shown.sort()).toEqual(folders.sort());
});

describe('docs/reference/cli.md', () => {
  const page = text('docs/reference/cli.md');
  const sections = new Map(
    page
      .split(/^(?=##+ )/m)
      .map((section) => [/^##+ `trefoil ([^`]+)`/.exec(section)?.[1] ?? '', section] as const)
      .filter(([name]) => name !== ''),
  );
  const commands = [
    ...COMMANDS.map(({ name }) => name).filter((name) => !['bench', 'eval', 'data', 'import', 'export'].includes(name)),
    ...BENCHES.map(({ name }) => `bench ${name}`),
    ...EVALUATIONS.map(({ name }) => `eval ${name}`),
    ...DATA_COMMANDS.map(({ name }) => `data ${name}`),
    ...IMPORTS.map(({ name }) => `import ${name}`),
    ...EXPORTS.map(({ name }) => `export ${name}`),
  ];

  it('has a section for every command, and no other', () => {
    expect([...sections.keys()].sort()).toEqual([...commands].sort());
  });

  it('has the exit codes of the program', () => {
    const codes = [...page.matchAll(/^\| (\d) \|/gm)].map((match) => Number(match[1]));
    expect(codes.sort()).toEqual(Object.values(ExitCode).sort());
  });
});

describe('docs/reference/model.md', () => {
  const tiny = { dim: 8, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 4, d_v: 4 };
  it.each(['avg', 'conv', 'mlp'] as const)('names every parameter of a model with phi %s', (phi) => {
    const shape = modelShape(configSchema.parse({ model: tiny, nsa: { phi } }), 16);
    const model = new LanguageModel(cpu(), shape, 1);
    const names = model.parameters.map((parameter) => parameter.name.replace(/^blocks\.0\./, 'blocks.L.'));
    model.free();
    const page = text('docs/reference/model.md');
    const missing = names.map((name) => name.replace('phi_v', 'phi_k')).filter((name) => !page.includes(`\`${name}\``));
    expect(missing).toEqual([]);
  });
});
