import { readFileSync } from 'node:fs';
import { describe, expect, it, vi } from 'vitest';
import { ExitCode, TrefoilError, UsageError } from '../errors.js';
import { COMMANDS, type CommandEntry, type CommandModule } from './commands.js';
import { countLost, createIo, ProgressLine, printJson, stylesFor } from './shared/io.js';
import { parseTrainFlags } from './shared/train-flags.js';
import { runCli } from './testing/run.js';

const entry = (name: string, module: CommandModule): CommandEntry => ({
  name,
  summary: `what ${name} does`,
  load: async () => module,
});
const failing = (error: unknown) => [
  entry('fail', {
    configure: (command) =>
      void command.action(() => {
        throw error;
      }),
  }),
];

describe('the command line', () => {
  it('prints the version of package.json', async () => {
    const { version } = JSON.parse(readFileSync(new URL('../../package.json', import.meta.url), 'utf8'));
    for (const flag of ['--version', '-V'])
      expect(await runCli([flag])).toEqual({ code: 0, stdout: `${version}\n`, stderr: '' });
  });

  it('lists all commands without loading one', async () => {
    const load = vi.fn(() => Promise.reject(new Error('loaded')));
    const commands = COMMANDS.map(({ name, summary }) => ({ name, summary, load }));
    for (const words of [['--help'], ['-h'], ['help']]) {
      const { code, stdout, stderr } = await runCli(words, { commands });
      expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
      for (const { name } of COMMANDS) expect(stdout).toMatch(new RegExp(`^  ${name} `, 'm'));
    }
    expect(load).not.toHaveBeenCalled();
  });

  it('groups the commands and names the one to start with', async () => {
    const { stdout } = await runCli(['--help']);
    const headings = [...new Set(COMMANDS.map(({ heading }) => heading))];
    expect(headings).toHaveLength(5);
    for (const heading of headings) expect(stdout).toContain(`\n${heading}\n`);
    expect(stdout.indexOf('  start ')).toBeLessThan(stdout.indexOf('  train '));
    expect(stdout).toContain('New here? `trefoil start`');
  });

  const pages = COMMANDS.flatMap((entry) =>
    'commands' in entry ? [[entry.name], ...entry.commands.map(({ name }) => [entry.name, name])] : [[entry.name]],
  );
  it.each([[], ...pages].map((words) => [words]))('prints help for %j that fits 80 columns', async (words) => {
    const { code, stdout, stderr } = await runCli([...words, '--help']);
    expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
    expect(stdout).toContain(`Usage: trefoil ${words.join(' ')}`.trimEnd());
    expect(stdout.split('\n').filter((line) => line.length > 80)).toEqual([]);
  });

  it('explains train with usage, defaults and examples', async () => {
    const { stdout } = await runCli(['train', '--help']);
    expect(stdout).toMatch(/^Usage: trefoil train \[options\]$/m);
    expect(stdout).toMatch(/--steps <n> +optimizer steps \(default: 1000\)/);
    expect(stdout).toMatch(/--lr <rate> +peak learning rate \(default: 0.0002\)/);
    const examples = stdout.split('Examples:\n')[1].split('\n\n')[0].split('\n');
    expect(examples.length).toBeGreaterThan(2);
    for (const example of examples)
      expect(() => parseTrainFlags(example.trim().split(' ').slice(2)), example).not.toThrow();
  });

  it('shows the defaults that apply to start', async () => {
    const { stdout } = await runCli(['start', '--help']);
    expect(stdout).toMatch(/--steps <n> +optimizer steps \(default: 1000\)/);
    expect(stdout).toMatch(/--lr <rate> +peak learning rate \(default: 0.003\)/);
    expect(stdout).toMatch(/\(default:\s+artifacts\/quickstart\)/);
  });

  it('lists first the configs that a newcomer wants', async () => {
    const { stdout } = await runCli(['configs']);
    const [first] = stdout.split('\n\n');
    expect(first.split('\n').flatMap((line) => /^(\w+) {2}/.exec(line)?.[1] ?? [])).toEqual([
      ...['first', 'quickstart', 'text_cpu', 'base', '125m_24g', '125m_80g'],
    ]);
  });

  it('prints the help on stderr when there is no command', async () => {
    for (const words of [[], ['bench']]) {
      const { code, stdout, stderr } = await runCli(words);
      expect({ code, stdout }).toEqual({ code: 2, stdout: '' });
      expect(stderr).toContain('Usage: trefoil');
    }
  });

  it.each([
    [['verfiy'], "trefoil: unknown command 'verfiy' (did you mean verify?)"],
    [
      ['finetune', '--model', 'x'],
      "trefoil: unknown command 'finetune'; fine-tune with trefoil train --config lora --from MODEL --local-path FILE (docs/guide/fine-tune.md)\n",
    ],
    [['frobnicate'], "trefoil: unknown command 'frobnicate'"],
    [['hat'], "trefoil: unknown command 'hat' (did you mean chat?)"],
    [['hlat'], "trefoil: unknown command 'hlat'\n"],
    [['chat', '--modle', 'x'], "'--model <path>' not specified (is --modle a misspelling?); see trefoil chat --help"],
    [['verify', '--ful'], "trefoil: unknown option '--ful' (did you mean --full?)"],
    [['--ful'], "trefoil: unknown option '--ful'"],
    [['bench', 'atention'], "trefoil: unknown command 'atention' (did you mean attention?)"],
    [['bench', 'attention', '--length', '3'], "trefoil: unknown option '--length' (did you mean --lengths?)"],
    [['verify', 'now'], "trefoil: too many arguments for 'verify'. Expected 0 arguments but got 1."],
    [['verify', '--threads', 'two'], "argument 'two' is invalid. It must be an integer >= 1."],
    [['verify', '--threads', '0'], "argument '0' is invalid. It must be an integer >= 1."],
    [['verify', '--threads', '99999'], 'trefoil: threads must be an integer from 1 to 1024, not 99999'],
    [['verify', '--device', 'gpu'], "argument 'gpu' is invalid. Allowed choices are auto, cpu, cuda."],
    [['verify', '--device', 'cuda'], 'trefoil: --device cuda: no CUDA device: '],
    [['attend'], "trefoil: required option '--in <file>' not specified"],
    [['attend'], "'--in <file>' not specified; see trefoil attend --help"],
    [
      ['generate', '--modle', 'x'],
      "'--model <path>' not specified (is --modle a misspelling?); see trefoil generate --help",
    ],
    [['train', '--stepz', '1'], "trefoil: unknown option '--stepz' (did you mean --steps?)"],
    [['start', '-x'], "trefoil: unknown option '-x'"],
    [['train', 'steps'], "trefoil: too many arguments for 'train'. Expected 0 arguments but got 1."],
    [['train', '--steps'], "trefoil: option '--steps <n>' argument missing"],
    [['train', '--steps', '--json'], 'trefoil: --steps: value missing; give <n>'],
    [['attend', '--in'], "trefoil: option '--in <file>' argument missing"],
    [['bench', 'attention', '--csv', '--json'], "option '--csv' cannot be used with option '--json'"],
    [['bench', 'attention', '--heads', '5'], 'trefoil: groups must divide heads: 2 does not divide 5'],
  ])('refuses %j in one line', async (words, line) => {
    const { code, stdout, stderr } = await runCli(words);
    expect({ code, stdout }).toEqual({ code: 2, stdout: '' });
    expect(stderr).toContain(line);
    expect(stderr).toMatch(/^trefoil: [^\n]+\n$/);
  });

  it('prints an expected failure in one line and ends with its code', async () => {
    const usage = await runCli(['fail'], { commands: failing(new UsageError('data.path: no such file')) });
    expect(usage).toEqual({ code: 2, stdout: '', stderr: 'trefoil: data.path: no such file\n' });
    const halted = await runCli(['fail'], { commands: failing(new TrefoilError('halted', ExitCode.halted)) });
    expect(halted).toEqual({ code: 3, stdout: '', stderr: 'trefoil: halted\n' });
  });

  it('prints an unexpected one in one line, and the stack when asked', async () => {
    const commands = failing(new RangeError('index out of range\nsecond line'));
    expect(await runCli(['fail'], { commands })).toEqual({
      code: 1,
      stdout: '',
      stderr: 'trefoil: internal error: index out of range; set TREFOIL_DEBUG=1 to print the stack\n',
    });
    const { stderr } = await runCli(['fail'], { commands, env: { TREFOIL_DEBUG: '1' } });
    expect(stderr).toContain('program.test.ts');
    expect((await runCli(['fail'], { commands: failing('a string') })).stderr).toContain('internal error: a string');
  });

  it('ends with the code a command sets', async () => {
    const commands = [
      entry('no', {
        configure: (command, io) => {
          command.option('--why').action(() => {
            io.exitCode = 1;
          });
        },
      }),
    ];
    expect((await runCli(['no', '--why'], { commands })).code).toBe(1);
  });
});

describe('output', () => {
  const text = 'x';
  const [on, off] = ['\x1b[31mx\x1b[39m', 'x'];
  it.each([
    [{}, true, on],
    [{}, false, off],
    [{ NO_COLOR: '1' }, true, off],
    [{ NO_COLOR: '' }, true, on],
    [{ TERM: 'dumb' }, true, off],
    [{ FORCE_COLOR: '1' }, false, on],
    [{ FORCE_COLOR: '1', NO_COLOR: '1' }, false, on],
    [{ FORCE_COLOR: '0' }, true, off],
  ])('has colour with %j on a terminal %j: %j', (env, isTTY, wanted) => {
    expect(stylesFor({ isTTY }, env).red(text)).toBe(wanted);
  });

  it('colours errors and warnings on a terminal only', async () => {
    const red = '\x1b[31mtrefoil:\x1b[39m no\n';
    const commands = failing(new UsageError('no'));
    expect((await runCli(['fail'], { commands, terminal: true })).stderr).toBe(red);
    expect((await runCli(['fail'], { commands, terminal: true, env: { NO_COLOR: '1' } })).stderr).toBe('trefoil: no\n');
  });

  it('goes on without its reader, counts what a full disk refuses, and fails on anything else', () => {
    let warnings = '';
    const stream = { write: (text: string) => (warnings += text) } as unknown as NodeJS.WritableStream;
    const io = createIo(stream, stream, {});
    const lose = (code: string) => countLost(Object.assign(new Error(`write ${code}`), { code }), io);
    for (const code of ['EPIPE', 'EIO']) lose(code);
    expect({ lost: io.lost, warnings }).toEqual({ lost: 0, warnings: '' });
    for (const code of ['ENOSPC', 'EDQUOT', 'ENOSPC']) lose(code);
    expect(io.lost).toBe(3);
    expect(warnings.match(/\n/g)).toHaveLength(1);
    expect(warnings).toContain('stdout: no space left on the disk; free some space; the command goes on');
    expect(() => lose('EBADF')).toThrow('EBADF');
  });

  it('is one JSON value that has no bare NaN', () => {
    const written: string[] = [];
    const stream = { write: (text: string) => written.push(text) } as unknown as NodeJS.WritableStream;
    printJson(createIo(stream, stream, {}), { a: [1, Number.NaN] });
    expect(JSON.parse(written.join(''))).toEqual({ a: [1, 'NaN'] });
  });

  it('has a progress line on terminals only, cut to their width', () => {
    const written: string[] = [];
    const stream = { write: (text: string) => written.push(text) } as unknown as NodeJS.WritableStream;
    const line = (facts: object) => new ProgressLine(createIo(stream, Object.assign(Object.create(stream), facts), {}));
    const silent = line({});
    silent.show('text');
    silent.clear();
    expect(written).toEqual([]);
    const terminal = line({ isTTY: true, columns: 5 });
    terminal.show('abcdefgh');
    terminal.clear();
    expect(written).toEqual(['\r\x1b[Kabcd', '\r\x1b[K']);
  });
});
