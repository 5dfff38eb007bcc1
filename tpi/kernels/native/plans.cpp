#include "plans.hpp"

#include <algorithm>
#include <cstring>

#include <nanobind/stl/string.h>

namespace tpi {

namespace {

const Kernels* chosen = nullptr;

Format format_of(const std::string& name) {
    if (name == "f32") return Format::f32;
    if (name == "bf16") return Format::bf16;
    if (name == "q8") return Format::q8;
    if (name == "q4") return Format::q4;
    if (name == "q4s") return Format::q4s;
    throw KernelError("unknown weight format " + name);
}

Activation activation_of(const std::string& name) {
    if (name == "silu") return Activation::silu;
    if (name == "gelu") return Activation::gelu;
    if (name == "gelu_tanh") return Activation::gelu_tanh;
    if (name == "relu") return Activation::relu;
    throw KernelError("unknown activation " + name);
}

template <class T> T field(const nb::tuple& fields, size_t index) { return nb::cast<T>(fields[index]); }

Py_ssize_t length(size_t value) { return static_cast<Py_ssize_t>(value); }

void zero(const Array& out) { std::memset(out.as<float>(), 0, out.total() * sizeof(float)); }

}  // namespace

const Kernels& kernels() {
    if (!chosen) chosen = available_kernels().front();
    return *chosen;
}

void use_kernels(const std::string& name) {
    const Kernels* found = find_kernels(name);
    if (!found) {
        std::string have;
        for (const Kernels* kernels : available_kernels()) have += (have.empty() ? "" : ", ") + std::string(kernels->name);
        throw KernelError("no kernels for the instruction set '" + name + "' here; this machine has " + have);
    }
    chosen = found;
}

// ---- runs ----

Run::Run(nb::tuple fields)
    : tiled_(field<bool>(fields, 0)),
      units_(field<size_t>(fields, 1)),
      width_(field<size_t>(fields, 2)),
      hidden_(field<size_t>(fields, 3)) {
    if (!width_ || !hidden_) throw KernelError("a run of units needs a width and a hidden size");
    size_t offset = 0;
    for (nb::handle item : field<nb::list>(fields, 4)) {
        auto part = nb::cast<nb::tuple>(item);
        Format format = format_of(field<std::string>(part, 1));
        parts_.push_back({field<std::string>(part, 0), format, field<std::string>(part, 2) == "column",
                          tiled_ ? offset * width_ : offset});
        check(parts_.back());
        offset += vector_bytes(format, hidden_);
    }
    if (parts_.empty()) throw KernelError("a run of units needs at least one part");
    record_bytes_ = offset;
    unit_bytes_ = offset * width_;
}

void Run::check(const Part& part) const {
    if (!is_quantised(part.format)) {
        if (tiled_) throw KernelError(part.name + " is not quantised and needs the record layout");
        return;
    }
    if (hidden_ % kGroup) throw KernelError("quantised weights need a hidden size that is a multiple of 32");
    if (tiled_ && width_ % (part.column ? kGroup : kTileOutputs))
        throw KernelError(part.name + " does not fill whole tiles with a unit width of " + std::to_string(width_));
}

const Run::Part& Run::part(const std::string& name) const {
    for (const Part& part : parts_)
        if (part.name == name) return part;
    throw KernelError("the run of units has no part called " + name);
}

bool Run::is_column(const std::string& name) const { return part(name).column; }

Matrix Run::matrix(const std::string& name, const uint8_t* data) const {
    const Part& found = part(name);
    return {data ? data + found.offset : nullptr, found.format, tiled_, units_, width_, hidden_, unit_bytes_,
            record_bytes_};
}

NormPlan::NormPlan(nb::tuple fields, size_t hidden)
    : rms(field<std::string>(fields, 0) == "rms"),
      eps(field<float>(fields, 1)),
      weight(keep_vector(fields[2], "the norm's weight", hidden)),
      bias(keep_vector(fields[3], "the norm's bias", hidden)) {
    if (weight.empty()) throw KernelError("a norm needs a weight");
}

Norm NormPlan::view() const { return {rms, eps, weight.data(), or_null(bias)}; }

// ---- attention ----

AttentionPlan::AttentionPlan(nb::tuple query, nb::tuple kv, nb::tuple norm, nb::tuple shape, nb::object kv_index,
                             nb::tuple vectors, nb::tuple numbers)
    : query_(query),
      kv_(kv),
      norm_(norm, query_.hidden()),
      heads_(field<size_t>(shape, 0)),
      kv_heads_(field<size_t>(shape, 1)),
      head_dim_(field<size_t>(shape, 2)),
      q_bias_(keep_vector(vectors[0], "q_bias", heads_ * head_dim_)),
      k_bias_(keep_vector(vectors[1], "k_bias", kv_heads_ * head_dim_)),
      v_bias_(keep_vector(vectors[2], "v_bias", kv_heads_ * head_dim_)),
      q_norm_(keep_vector(vectors[3], "q_norm", head_dim_)),
      k_norm_(keep_vector(vectors[4], "k_norm", head_dim_)),
      rope_scale_(field<float>(numbers, 0)),
      scale_(field<float>(numbers, 1)),
      softcap_(field<float>(numbers, 2)),
      window_(field<size_t>(numbers, 3)) {
    Array index(kv_index, "kv_index", "i", {length(heads_)});
    check_indices(index, "KV head", kv_heads_);
    kv_index_.assign(index.as<int32_t>(), index.as<int32_t>() + heads_);
    Array frequencies(vectors[5], "inv_freq", "f", {kAny});
    inv_freq_.assign(frequencies.as<float>(), frequencies.as<float>() + frequencies.total());
    if (2 * inv_freq_.size() > head_dim_) throw KernelError("inv_freq is longer than half a head");
    if (kv_.hidden() != query_.hidden()) throw KernelError("the query and KV runs differ in hidden size");
    if (query_.vectors() < heads_ * head_dim_ || kv_.vectors() < kv_heads_ * head_dim_)
        throw KernelError("the runs hold fewer vectors than the heads need");
    call(nullptr);  // all parts are there
}

AttentionCall AttentionPlan::call(const uint8_t* data) const {
    const uint8_t* kv_data = data ? data + query_.bytes() : nullptr;
    AttentionCall call{};
    call.q = query_.matrix("q", data);
    call.o = query_.matrix("o", data);
    call.k = kv_.matrix("k", kv_data);
    call.v = kv_.matrix("v", kv_data);
    call.norm = norm_.view();
    call.heads = heads_;
    call.kv_heads = kv_heads_;
    call.head_dim = head_dim_;
    call.hidden = query_.hidden();
    call.kv_index = kv_index_.data();
    call.q_bias = or_null(q_bias_);
    call.k_bias = or_null(k_bias_);
    call.v_bias = or_null(v_bias_);
    call.q_norm = or_null(q_norm_);
    call.k_norm = or_null(k_norm_);
    call.inv_freq = inv_freq_.data();
    call.half_rotary = inv_freq_.size();
    call.rope_scale = rope_scale_;
    call.scale = scale_;
    call.softcap = softcap_;
    call.window = window_;
    return call;
}

std::unique_ptr<Array> AttentionPlan::weights(nb::handle data) const {
    return keep_array(data, "the weights", "B", {length(query_.bytes() + kv_.bytes())});
}

std::unique_ptr<Array> AttentionPlan::cache(nb::handle array, const char* name) const {
    auto found = keep_array(array, name, "feB", {kAny, length(kv_heads_), length(kBlockTokens), kAny}, true);
    size_t width = found->size(3), groups = (head_dim_ + kGroup - 1) / kGroup;
    size_t expected = found->type() == 'B' ? head_dim_ + 2 * groups : head_dim_;
    if (width != expected)
        throw KernelError(std::string(name) + " holds vectors of " + std::to_string(width) + " elements; expected " +
                          std::to_string(expected));
    return found;
}

Kv AttentionPlan::view(const Array& cache) const {
    size_t width = cache.size(3);
    if (cache.type() == 'f') return {cache.as<uint8_t>(), KvFormat::f32, 4 * width};
    if (cache.type() == 'e') return {cache.as<uint8_t>(), KvFormat::f16, 2 * width};
    return {cache.as<uint8_t>(), KvFormat::q8, width};
}

BatchArrays::BatchArrays(nb::handle positions_, nb::handle sequence_, nb::handle tables_, size_t tokens)
    : positions(positions_, "positions", "i", {length(tokens)}),
      sequence(sequence_, "sequence", "i", {length(tokens)}),
      tables(tables_, "tables", "i", {kAny, kAny}) {}

void AttentionPlan::check_batch(const BatchArrays& batch, const Array& keys, const Array& values) const {
    check_indices(batch.sequence, "sequence", batch.tables.size(0));
    check_indices(batch.positions, "position", batch.tables.size(1) * kBlockTokens);
    const auto *table = batch.tables.as<int32_t>(), *positions = batch.positions.as<int32_t>();
    const auto* sequence = batch.sequence.as<int32_t>();
    size_t width = batch.tables.size(1), blocks = std::min(keys.size(0), values.size(0));
    for (size_t t = 0; t < batch.positions.total(); ++t) {
        auto position = static_cast<size_t>(positions[t]);
        const int32_t* row = table + static_cast<size_t>(sequence[t]) * width;
        size_t first = window_ && position + 1 > window_ ? position + 1 - window_ : 0;
        bool follows = t && sequence[t] == sequence[t - 1] && positions[t] == positions[t - 1] + 1;
        if (follows) first = position;  // the others were checked with the token before
        for (size_t b = first / kBlockTokens; b <= position / kBlockTokens; ++b)
            if (row[b] < 0 || static_cast<size_t>(row[b]) >= blocks)
                throw KernelError("KV block " + std::to_string(row[b]) + " is outside the " + std::to_string(blocks) +
                                  " of this node");
    }
}

AttentionCall AttentionPlan::call(const Array& weights, const Array& keys, const Array& values,
                                  const BatchArrays& batch, const float* x, float* out) const {
    AttentionCall call = this->call(weights.as<uint8_t>());
    call.tokens = batch.positions.total();
    call.x = x;
    call.out = out;
    call.keys = view(keys);
    call.values = view(values);
    call.positions = batch.positions.as<int32_t>();
    call.sequence = batch.sequence.as<int32_t>();
    call.tables = batch.tables.as<int32_t>();
    call.table_width = batch.tables.size(1);
    return call;
}

void AttentionPlan::run(nb::handle data, nb::handle x, nb::handle keys, nb::handle values, nb::handle positions,
                        nb::handle sequence, nb::handle tables, nb::handle out) const {
    auto held = weights(data), key_array = cache(keys, "the key cache"), value_array = cache(values, "the value cache");
    Array input(x, "x", "f", {kAny, length(hidden())});
    BatchArrays batch(positions, sequence, tables, input.size(0));
    Array result(out, "out", "f", {length(input.size(0)), length(hidden())}, true);
    check_batch(batch, *key_array, *value_array);
    if (!heads_ || !result.total()) return zero(result);
    launch(kernels().attention,
           call(*held, *key_array, *value_array, batch, input.as<float>(), result.as<float>()));
}

// ---- feed-forward ----

FfnPlan::FfnPlan(nb::tuple neuron, nb::tuple norm, const std::string& activation, bool gated, nb::object gate_bias,
                 nb::object up_bias)
    : neuron_(neuron),
      norm_(norm, neuron_.hidden()),
      activation_(activation_of(activation)),
      gated_(gated),
      gate_bias_(keep_vector(gate_bias, "gate_bias", neuron_.vectors())),
      up_bias_(keep_vector(up_bias, "up_bias", neuron_.vectors())) {
    if (gated_) neuron_.matrix("gate", nullptr);
    neuron_.matrix("up", nullptr);
    neuron_.matrix("down", nullptr);
}

std::unique_ptr<Array> FfnPlan::weights(nb::handle data) const {
    return keep_array(data, "the weights", "B", {length(neuron_.bytes())});
}

FfnCall FfnPlan::call(const Array& weights, size_t tokens, const float* x, float* out) const {
    FfnCall call{};
    if (gated_) call.gate = neuron_.matrix("gate", weights.as<uint8_t>());
    call.up = neuron_.matrix("up", weights.as<uint8_t>());
    call.down = neuron_.matrix("down", weights.as<uint8_t>());
    call.norm = norm_.view();
    call.activation = activation_;
    call.gate_bias = or_null(gate_bias_);
    call.up_bias = or_null(up_bias_);
    call.tokens = tokens;
    call.hidden = neuron_.hidden();
    call.x = x;
    call.out = out;
    return call;
}

void FfnPlan::run(nb::handle data, nb::handle x, nb::handle active, nb::handle out) const {
    auto held = weights(data);
    Array input(x, "x", "f", {kAny, length(hidden())});
    Array result(out, "out", "f", {length(input.size(0)), length(hidden())}, true);
    FfnCall call = this->call(*held, input.size(0), input.as<float>(), result.as<float>());
    if (!call.tokens || !neuron_.units()) return zero(result);
    if (active.is_none()) return launch(kernels().ffn, call);
    if (neuron_.tiled())
        throw KernelError("a list of active neurons needs a pack in the record layout; this one is tiled");
    Array list(active, "the list of active neurons", "i", {kAny});
    check_indices(list, "active neuron", neuron_.vectors());
    if (!list.total()) return zero(result);
    call.active = list.as<int32_t>();
    call.active_count = list.total();
    launch(kernels().ffn, call);
}

// ---- tables and norms ----

void RunPlan::rows(nb::handle data, nb::handle x, nb::handle out) const {
    Array weights(data, "the weights", "B", {length(run_.bytes())});
    Array input(x, "x", "f", {kAny, length(run_.hidden())});
    Array result(out, "out", "f", {length(input.size(0)), length(run_.vectors())}, true);
    if (!result.total()) return;
    if (run_.is_column(run_.first_part())) throw KernelError("a table needs a part of rows");
    RowsCall call{run_.matrix(run_.first_part(), weights.as<uint8_t>()), input.size(0), input.as<float>(),
                  result.as<float>()};
    launch(kernels().rows, call);
}

void RunPlan::gather(nb::handle data, nb::handle rows, nb::handle out) const {
    Array weights(data, "the weights", "B", {length(run_.bytes())});
    Array list(rows, "rows", "i", {kAny});
    Array result(out, "out", "f", {length(list.total()), length(run_.hidden())}, true);
    check_indices(list, "row", run_.vectors());
    if (run_.is_column(run_.first_part())) throw KernelError("a table needs a part of rows");
    DecodeCall call{run_.matrix(run_.first_part(), weights.as<uint8_t>()), list.as<int32_t>(), list.total(),
                    result.as<float>()};
    launch(kernels().decode_rows, call);
}

void RunPlan::decode(nb::handle data, const std::string& part, nb::handle out) const {
    Array weights(data, "the weights", "B", {length(run_.bytes())});
    Array result(out, "out", "f", {length(run_.vectors()), length(run_.hidden())}, true);
    DecodeCall call{run_.matrix(part, weights.as<uint8_t>()), nullptr, run_.vectors(), result.as<float>()};
    launch(run_.is_column(part) ? kernels().decode_columns : kernels().decode_rows, call);
}

void run_read(nb::handle data) {
    Array bytes(data, "the data", "B", {kAny});
    launch(kernels().read, ReadCall{bytes.as<uint8_t>(), bytes.total(), nullptr});
}

void run_norm(nb::handle x, nb::tuple norm, nb::handle out) {
    Array input(x, "x", "f", {kAny, kAny});
    Array result(out, "out", "f", {length(input.size(0)), length(input.size(1))}, true);
    Array weight(norm[2], "the norm's weight", "f", {length(input.size(1))});
    bool has_bias = !norm[3].is_none();
    Array bias(has_bias ? nb::handle(norm[3]) : nb::handle(norm[2]), "the norm's bias", "f", {length(input.size(1))});
    Norm view{field<std::string>(norm, 0) == "rms", field<float>(norm, 1), weight.as<float>(),
              has_bias ? bias.as<float>() : nullptr};
    launch(kernels().norm, NormCall{view, input.size(0), input.size(1), input.as<float>(), result.as<float>()});
}

}  // namespace tpi
