// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "command.hpp"
#include "plan/plan.hpp"
#include "plan/plan_report.hpp"
#include "plan/source.hpp"
#include "units.hpp"

namespace kvcache::cli {
namespace {

/// The options as they were written; read when the command runs, so that errors are ours.
struct plan_options {
  std::string model, gguf, config, shape;
  std::string kv = "f16", context = "4096", batch = "1", weights_bits, parameters, memory, bandwidth, block;
  bool list = false;
  std::vector<std::string> unexpected;
};

constexpr const char* examples =
    "Examples:\n"
    "  kvcache plan --model llama-3-8b --context 8k --batch 32 --memory 80GiB --bandwidth 3.35TB/s\n"
    "  kvcache plan --gguf model.gguf --kv kv4 --context 32k --memory 16GB\n"
    "  kvcache plan --config config.json --kv fp8 --weights-bits 8 --json\n"
    "  kvcache plan --shape layers=80,kv_heads=8,q_heads=64,head_dim=128 --parameters 69e9\n"
    "\n"
    "Sizes are those of the library's own allocator. GB is 10^9 bytes, GiB 2^30; 8k tokens are 8,192.\n"
    "Exit codes: 0 answered (also if it does not fit: \"fits\"), 1 cannot run, 2 wrong command line, 3 bad "
    "input.\n";

void add_options(CLI::App& app, plan_options& o) {
  app.add_option("--model", o.model, "a model by name (--list shows all)")->type_name("NAME");
  app.add_option("--gguf", o.gguf, "the metadata of a GGUF file")->type_name("FILE");
  app.add_option("--config", o.config, "a Hugging Face config.json")->type_name("FILE");
  app.add_option(
         "--shape", o.shape,
         "layers=80,kv_heads=8,q_heads=64,head_dim=128; also head_dim_v, window, full_every, or latent and "
         "rope for MLA")
      ->type_name("KEY=N,...");
  app.add_flag("--list", o.list, "the models that are known by name");
  app.add_option("--kv", o.kv,
                 "how the cache is stored: f32, f16, bf16, fp8, kv8, kv6, kv5, kv4, kv3, kv2, k8v4 and the "
                 "like, or a "
                 "format in all its parts such as k=int8,v=int4,group=64")
      ->type_name("FORMAT")
      ->capture_default_str();
  app.add_option("--context", o.context, "tokens per sequence")->type_name("N")->capture_default_str();
  app.add_option("--batch", o.batch, "sequences")->type_name("B")->capture_default_str();
  app.add_option("--weights-bits", o.weights_bits,
                 "16, 8 or 4 bits per parameter; default: as the file has them, else 16")
      ->type_name("BITS");
  app.add_option("--parameters", o.parameters, "how many the model has, where that is not known")
      ->type_name("N");
  app.add_option("--memory", o.memory, "for weights and cache, such as 80GiB or 24GB")->type_name("BYTES");
  app.add_option("--bandwidth", o.bandwidth, "of that memory, such as 3.35TB/s")->type_name("BYTES/s");
  app.add_option("--block", o.block, "tokens per block; default 16, packed formats 64 (32 to 128)")
      ->type_name("N");
  // Nothing is taken without a name; collected here, as the parser looks an empty one up among its nameless
  // option groups and does not come back.
  app.add_option("unexpected", o.unexpected)->group("");
}

[[noreturn]] void conflict(const char* field, std::string value, const char* wanted) {
  throw error(failure::usage, "conflict", field, std::move(value)).wanting(wanted);
}

model read_model(const CLI::App& app, const plan_options& o) {
  constexpr const char* wanted = "exactly one of --model, --gguf, --config, --shape";
  std::string given;
  for (const char* name : {"--model", "--gguf", "--config", "--shape"}) {
    if (app.count(name) != 0) given += (given.empty() ? "" : " ") + std::string(name);
  }
  if (given.empty()) throw error(failure::usage, "missing", "model", {}).wanting(wanted);
  if (given.find(' ') != std::string::npos) conflict("model", given, wanted);
  if (given == "--model") return model_of_name("--model", o.model);
  if (given == "--gguf") return read_gguf(o.gguf);
  if (given == "--config") return read_config(o.config);
  return model_of_shape("--shape", o.shape);
}

// Parameters that the person says. Of a mixture it is no longer known which are experts'.
void set_parameters(const plan_options& o, model& m) {
  m.parameters = parse_amount("--parameters", o.parameters);
  if (m.parameters >= std::int64_t{1} << 55) {
    throw error(failure::usage, "bad_value", "--parameters", o.parameters).wanting("less than 2^55");
  }
  m.parameters_by = "given";
  m.stored_bytes = m.expert_parameters = 0;
}

std::int32_t bits_of(const plan_options& o) {
  for (const std::int32_t bits : {16, 8, 4}) {
    if (o.weights_bits == std::to_string(bits)) return bits;
  }
  throw error(failure::usage, "bad_value", "--weights-bits",
              o.weights_bits.empty() ? "empty" : o.weights_bits)
      .wanting("16, 8 or 4");
}

std::int32_t block_of(const plan_options& o) {
  const std::int64_t block = parse_count("--block", o.block, 1, 65536);
  if ((block & (block - 1)) != 0) {
    throw error(failure::usage, "bad_value", "--block", o.block).wanting("a power of two from 1 to 65536");
  }
  return static_cast<std::int32_t>(block);
}

json run_plan(const CLI::App& app, const plan_options& o) {
  if (!o.unexpected.empty()) {
    throw error(failure::usage, "unexpected", "arguments", o.unexpected[0]).wanting("options only");
  }
  if (o.list) {
    for (const CLI::Option* option : app.get_options()) {
      const std::string name = option->get_name();
      const bool fine = name == "--list" || name == "--json" || name == "--progress";
      if (option->count() != 0 && !fine) conflict("--list", name, "--list alone");
    }
    return catalogue_document();
  }
  plan_request r;
  // Options first: what is cheap to check is checked before a file is read.
  r.kv = parse_kv("--kv", o.kv);
  const std::int64_t context = parse_tokens("--context", o.context);
  if (context > 1 << 28) {
    throw error(failure::usage, "bad_value", "--context", o.context).wanting("at most 2^28 tokens");
  }
  r.context = static_cast<std::int32_t>(context);
  r.batch = static_cast<std::int32_t>(parse_count("--batch", o.batch, 1, 1 << 20));
  const auto given = [&](const char* name) { return app.count(name) != 0; };
  if (given("--weights-bits")) r.weights_bits = bits_of(o);
  if (given("--memory")) r.memory = parse_bytes("--memory", o.memory);
  if (given("--bandwidth")) r.bandwidth = parse_bandwidth("--bandwidth", o.bandwidth);
  if (given("--block")) r.block = block_of(o);
  r.subject = read_model(app, o);
  if (given("--parameters")) set_parameters(o, r.subject);
  return to_document(make_plan(std::move(r)));
}

}  // namespace

command add_plan(CLI::App& program) {
  const auto options = std::make_shared<plan_options>();
  command c;
  c.app =
      program.add_subcommand("plan", "What a model's cache needs, what fits, and what a decode step reads");
  c.app->footer(examples);
  add_options(*c.app, *options);
  c.run = [app = c.app, options](progress&) { return run_plan(*app, *options); };
  c.describe = plan_text;
  return c;
}

}  // namespace kvcache::cli
