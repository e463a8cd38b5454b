/** Post-processors: the special tokens that a tokenizer puts around a text. */
import * as z from '../../../zod.js';
import { type Step, stepsOf } from './step.js';

/** Token ids before and after a text. */
export interface Frame {
  readonly before: readonly number[];
  readonly after: readonly number[];
}

const NOTHING: Frame = { before: [], after: [] };

const Template = z.looseObject({
  single: z.array(
    z.object({ SpecialToken: z.object({ id: z.string() }).optional(), Sequence: z.looseObject({}).optional() }),
  ),
  special_tokens: z.record(z.string(), z.object({ ids: z.array(z.number().int()) })),
});
const Marks = z.looseObject({
  cls: z.tuple([z.string(), z.number().int()]),
  sep: z.tuple([z.string(), z.number().int()]),
});

export function createFrame(step: Step | null | undefined): Frame {
  if (!step) return NOTHING;
  switch (step.type) {
    case 'Sequence':
      return stepsOf(step, 'processors')
        .map(createFrame)
        .reduce(
          (inner, outer) => ({
            before: [...outer.before, ...inner.before],
            after: [...inner.after, ...outer.after],
          }),
          NOTHING,
        );
    case 'ByteLevel': // concerns offsets only
      return NOTHING;
    case 'BertProcessing':
    case 'RobertaProcessing': {
      const { cls, sep } = Marks.parse(step);
      return { before: [cls[1]], after: [sep[1]] };
    }
    case 'TemplateProcessing': {
      const { single, special_tokens } = Template.parse(step);
      const idsOf = (parts: typeof single): number[] =>
        parts.flatMap(({ SpecialToken }) => (SpecialToken ? (special_tokens[SpecialToken.id]?.ids ?? []) : []));
      const text = single.findIndex(({ Sequence }) => Sequence !== undefined);
      if (text < 0) throw new Error('the TemplateProcessing post-processor has no place for the text');
      return { before: idsOf(single.slice(0, text)), after: idsOf(single.slice(text + 1)) };
    }
    default:
      throw new Error(`the post-processor "${step.type}" is not supported`);
  }
}
