/** How what a model answers is written: calls of tools and reasoning. template-form.ts finds it in a chat template. */

/**
 * Text in which an id stands between each two parts. One part: no id.
 * @opaque
 */
export type WithIds = readonly string[];

/**
 * How calls are written. The arguments of a call are one JSON object.
 * @opaque
 */
export interface CallForm {
  /** The text whose appearance begins the calls. */
  readonly marker: string;
  /** Whether the marker counts at the beginning of the content only, since it could be part of any JSON text. */
  readonly isFirst: boolean;
  /** From the marker to the name of the first call. */
  readonly open: string;
  /** From a name to the arguments. */
  readonly middle: WithIds;
  /** From the arguments to the name of the next call; null if a message holds one call only. */
  readonly between: WithIds | null;
  /** From the last arguments to the end of the answer. */
  readonly end: WithIds;
}

/**
 * The parts that an answer of a model may have besides its content.
 * @opaque
 */
export interface AnswerForm {
  /** Null: the request has no tools. */
  readonly calls: CallForm | null;
  /** `open`: the answer begins inside of the reasoning. `possible`: it may begin with it. */
  readonly reasoning: 'open' | 'possible' | null;
}

/** Facts about a chat template. */
export interface TemplateForm {
  /** Null: the template writes no calls, or in a form that is not JSON. */
  readonly calls: CallForm | null;
  /** Whether the template writes calls that are not JSON. */
  readonly hasOtherCalls: boolean;
  /** Whether the template takes arguments as text instead of as an object. */
  readonly takesText: boolean;
  readonly writesTools: boolean;
  /** Whether messages of the role `tool` are written, by a template that knows tools. */
  readonly writesResults: boolean;
  readonly takesSystem: boolean;
  readonly mayReason: boolean;
}

export const REASONING = { open: '<think>', close: '</think>' } as const;

/** The form of templates without one of their own: that of the Hermes models. */
export const HERMES: CallForm = {
  marker: '<tool_call>',
  isFirst: false,
  open: '\n{"name": "',
  middle: ['", "arguments": '],
  between: ['}\n</tool_call>\n<tool_call>\n{"name": "'],
  end: ['}\n</tool_call>'],
};

/** Ids that templates with ids in the text take: Mistral's have nine letters or digits. */
export const ID_LENGTH = 9;

/** Whether an answer after this prompt begins inside of the reasoning. */
export function opensReasoning(prompt: string): boolean {
  return prompt.trimEnd().endsWith(REASONING.open);
}
