/** `trefoil configs`: the configs and profiles that ship with the package. */
import { readFileSync } from 'node:fs';
import type { Command } from 'commander';
import { parse } from 'yaml';
import { earlierNameLine, findConfig } from '../config/files.js';
import { shippedConfigs } from '../config/shipped.js';
import { type Io, printJson } from './shared/io.js';
import { jsonOption } from './shared/options.js';
import { formatTable, wrapped } from './shared/table.js';

const HELP = `
Use a config with \`trefoil train --config NAME\`. To change it, copy it:
  trefoil configs quickstart > mine.yaml
  trefoil train --config mine.yaml
A profile holds the settings for one kind of machine:
  trefoil train --config base --set runtime.profile=h200
Every key is explained in configs/base.yaml.
`;

export function configure(command: Command, io: Io): void {
  command
    .argument('[name]', 'print this config as YAML')
    .addOption(jsonOption('{configs: [{name, description}], profiles: [...]}; with a name {name, description, config}'))
    .addHelpText('after', HELP)
    .action((name: string | undefined, options: { json?: boolean }) => {
      if (name === undefined) list(options.json ?? false, io);
      else print(name, options.json ?? false, io);
    });
}

function print(name: string, json: boolean, io: Io): void {
  const file = findConfig(name);
  const { path } = file;
  for (const line of earlierNameLine(file)) io.warn(line);
  const text = readFileSync(path, 'utf8');
  if (json) printJson(io, { name, description: description(path), config: parse(text) });
  else io.stdout.write(text);
}

/** Names that a newcomer wants first, in this order. */
const FIRST = ['quickstart', 'text_cpu', 'base', '125m_24g', '125m_80g'];

function list(json: boolean, io: Io): void {
  const [configs, profiles] = (['configs', 'configs/profiles'] as const).map((shelf) =>
    shippedConfigs(shelf).map((name) => ({ name, description: description(findConfig(name, shelf).path) })),
  );
  if (json) {
    printJson(io, { configs, profiles });
    return;
  }
  const table = (title: string, rows: typeof configs) =>
    formatTable(
      [title, wrapped('description')],
      rows.map(({ name, description: text }) => [name, text]),
      io.width,
    );
  const isFirst = ({ name }: { readonly name: string }) => FIRST.includes(name);
  const place = ({ name }: { readonly name: string }) => FIRST.indexOf(name);
  io.out(
    table(
      'first',
      configs.filter(isFirst).sort((a, b) => place(a) - place(b)),
    ),
  );
  io.out(
    table(
      'more',
      configs.filter((one) => !isFirst(one)),
    ),
  );
  io.out(table('profile', profiles));
  io.out('Use one with `trefoil train --config NAME`; `trefoil configs NAME` prints it.');
}

/** The first line of a config is a comment that describes it. */
function description(path: string): string {
  return /^# (.*)/.exec(readFileSync(path, 'utf8'))?.[1] ?? '';
}
