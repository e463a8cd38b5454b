/** The surface of the library: exactly these values; every type that they mention is exported; all are documented. */
import { join } from 'node:path';
import ts from 'typescript';
import { describe, expect, it } from 'vitest';
import * as bench from '../src/exports/bench.js';
import * as data from '../src/exports/data.js';
import * as ops from '../src/exports/ops.js';
import * as run from '../src/exports/run.js';
import * as serve from '../src/exports/serve.js';
import * as verify from '../src/exports/verify.js';
import * as library from '../src/index.js';
import { root, runNode } from '../src/testing/cli.js';

const words = (text: string) => text.trim().split(/\s+/).sort();

/** A new name is added here on purpose. */
const VALUES: readonly [name: string, entry: object, values: string[]][] = [
  [
    'trefoil',
    library,
    words(`AdamW Attention Block CpuDevice DecodeCache ExitCode FeedForward HostStepper LanguageModel Muon NonFiniteStep Parameter
      ParameterStore RequestRefused Sequences SourceFailed Tape Tensor Trainer TrefoilError UsageError createEngine cudaAbsence estimateMemory generate
      generateAll loadModel modelShape openDevice parseConfig prefill readConfig readTokens sparseLayout train withTape
      writeFinalModel`),
  ],
  [
    'trefoil/ops',
    ops,
    words(`RotaryTable Sequences add clipFactor combine compressAverage compressConv compressMlp compressedAttention crossEntropy
      crossEntropyLosses denseAttention embedding fillIntegers fillNormal fillUniform gate gateStatistics gradientNorm linear
      linearCrossEntropy nativeSparseAttention rmsnorm rotate selectBlocks selectedAttention silu sparseLayout splitHeads
      swiglu validateShapes windowAttention`),
  ],
  ['trefoil/data', data, words('applyChatTemplate createLoader createTokenizer encodeChat')],
  [
    'trefoil/run',
    run,
    words(`TRAINING_CSV VAL_CSV findCheckpoint openWorld readCsv readHeartbeats readSafetensors resolveRank runPaths writeHalt
      writeSafetensors`),
  ],
  ['trefoil/bench', bench, words('benchAttention benchLinear benchTraining measurePeak trainCases')],
  ['trefoil/verify', verify, words('attend attendReference checksFor readCase summarize verifyDevice')],
  ['trefoil/serve', serve, words('serveModel')],
];

describe.each(VALUES)('%s', (_, entry, values) => {
  it('exports exactly these values', () => expect(Object.keys(entry).sort()).toEqual(values));
});

describe('the declarations of all entry points', () => {
  const files = [
    'index',
    'exports/ops',
    'exports/data',
    'exports/run',
    'exports/bench',
    'exports/verify',
    'exports/serve',
  ];
  const paths = files.map((name) => join(root, 'src', `${name}.ts`));
  const parsed = ts.getParsedCommandLineOfConfigFile(
    join(root, 'tsconfig.json'),
    {},
    {
      ...ts.sys,
      onUnRecoverableConfigFileDiagnostic: (problem) => {
        throw new Error(String(problem.messageText));
      },
    },
  );
  const program = ts.createProgram(paths, parsed!.options);
  const checker = program.getTypeChecker();
  const original = (symbol: ts.Symbol) =>
    symbol.flags & ts.SymbolFlags.Alias ? checker.getAliasedSymbol(symbol) : symbol;
  const exported = new Map<ts.Symbol, string>();
  for (const path of paths) {
    const module = checker.getSymbolAtLocation(program.getSourceFile(path)!)!;
    for (const symbol of checker.getExportsOfModule(module)) exported.set(original(symbol), symbol.name);
  }

  /** Types of this project that a node mentions. */
  function mentioned(node: ts.Node, found: ts.Symbol[] = []): ts.Symbol[] {
    if (ts.isTypeReferenceNode(node) || ts.isExpressionWithTypeArguments(node)) {
      const symbol = checker.getSymbolAtLocation('typeName' in node ? node.typeName : node.expression);
      const target = symbol && original(symbol);
      const [declaration] = target?.declarations ?? [];
      const isOurs = declaration?.getSourceFile().fileName.startsWith(join(root, 'src'));
      if (target && isOurs && !ts.isTypeParameterDeclaration(declaration)) found.push(target);
    }
    ts.forEachChild(node, (child) => void mentioned(child, found));
    return found;
  }

  /** The parts of a declaration that its users see. */
  function signature(declaration: ts.Declaration): ts.Node[] {
    const typed = (node: ts.Node) => {
      const { type, parameters = [] } = node as { type?: ts.TypeNode; parameters?: readonly ts.ParameterDeclaration[] };
      return [type, ...parameters.map((parameter) => parameter.type)].filter((one) => one !== undefined);
    };
    if (!ts.isClassDeclaration(declaration) && !ts.isInterfaceDeclaration(declaration)) return typed(declaration);
    const members = [...declaration.members].filter(({ name }) => !name || !ts.isPrivateIdentifier(name));
    return [...(declaration.heritageClauses ?? []), ...members.flatMap(typed)];
  }

  it('mention only types that are exported too', () => {
    const missing = [...exported].flatMap(([symbol, name]) =>
      (symbol.declarations ?? [])
        .flatMap(signature)
        .flatMap((node) => mentioned(node))
        .filter((type) => !exported.has(type))
        .map((type) => `${name} mentions ${type.name}`),
    );
    expect([...new Set(missing)]).toEqual([]);
    expect(exported.size).toBeGreaterThan(150);
  });

  it('have a doc comment', () => {
    const bare = [...exported].filter(([symbol]) => symbol.getDocumentationComment(checker).length === 0);
    expect(bare.map(([, name]) => name)).toEqual([]);
  });

  it.each(['Config', 'ConfigInput'])('have a comment on every key of %s', (name) => {
    const [config] = [...exported].find(([, exportedAs]) => exportedAs === name)!;
    const sections = checker.getDeclaredTypeOfSymbol(config).getProperties();
    const keys = sections.flatMap((section) =>
      checker.getNonNullableType(checker.getTypeOfSymbol(section)).getProperties(),
    );
    expect(keys.length).toBeGreaterThan(100);
    expect(keys.filter((key) => key.getDocumentationComment(checker).length === 0).map((key) => key.name)).toEqual([]);
  });

  // A process of its own: typedoc's messages go to the terminal.
  it('become pages without a warning: npm run docs', async () => {
    const typedoc = join(root, 'node_modules', 'typedoc', 'bin', 'typedoc');
    expect(await runNode([typedoc, '--emit', 'none'])).toEqual({ code: 0, stdout: '', stderr: '' });
  });
});
