#include "plans.hpp"

#include <nanobind/stl/string.h>

#include <iterator>

namespace tpi {

namespace {

const Kernels* chosen = nullptr;

constexpr const char* kFormats[] = {"f32", "bf16", "f16", "q8", "q4", "q4s", "mxfp4", "q6", "q5", "q3", "q2", "iq4",
                                    "iq3s", "iq3", "iq2", "iq1", "nvfp4"};  // in the order of `Format`

Format format_of(const std::string& name) {
    for (size_t i = 0; i < std::size(kFormats); ++i)
        if (name == kFormats[i]) return static_cast<Format>(i);
    throw KernelError("unknown weight format " + name);
}

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
    if (!is_record(part.format) && !tiled_) throw KernelError(part.name + " has a format that needs the tiled layout");
    if (hidden_ % kGroup) throw KernelError("quantised weights need a hidden size that is a multiple of 32");
    if (tiled_ && width_ % (part.column ? kGroup : kTileOutputs))
        throw KernelError(part.name + " does not fill whole tiles with a unit width of " + std::to_string(width_));
}

const Run::Part& Run::part(const std::string& name) const {
    for (const Part& part : parts_)
        if (part.name == name) return part;
    throw KernelError("the run of units has no part called " + name);
}

bool Run::has(const std::string& name) const {
    for (const Part& part : parts_)
        if (part.name == name) return true;
    return false;
}

bool Run::is_column(const std::string& name) const { return part(name).column; }

Matrix Run::matrix(const std::string& name, const uint8_t* data) const {
    const Part& found = part(name);
    return {data ? data + found.offset : nullptr, found.format, tiled_, units_, width_, hidden_, unit_bytes_,
            record_bytes_};
}

Matrix Run::matrix(const std::string& name, const uint8_t* data, size_t first, size_t units) const {
    Matrix some = matrix(name, data + first * unit_bytes_);
    some.units = units;
    return some;
}

NormPlan::NormPlan(nb::tuple fields, size_t hidden)
    : rms(field<std::string>(fields, 0) == "rms"),
      eps(field<float>(fields, 1)),
      weight(keep_vector(fields[2], "the norm's weight", field<std::string>(fields, 0) == "none" ? 0 : hidden)),
      bias(keep_vector(fields[3], "the norm's bias", hidden)) {
    if (weight.empty() && field<std::string>(fields, 0) != "none") throw KernelError("a norm needs a weight");
}

Norm NormPlan::view() const { return {rms, eps, or_null(weight), or_null(bias)}; }

// ---- tables and norms ----

void RunPlan::rows(nb::handle data, nb::handle x, nb::handle out) const {
    Array weights(data, "the weights", "B", {length(run_.bytes())});
    Array input(x, "x", "f", {kAny, length(run_.hidden())});
    Array result(out, "out", "f", {length(input.size(0)), length(run_.vectors())}, true);
    if (!result.total()) return;
    if (run_.is_column(run_.first_part())) throw KernelError("a table needs a part of rows");
    RowsCall call{run_.matrix(run_.first_part(), weights.as<uint8_t>()), input.size(0), input.as<float>(),
                  result.as<float>(), nullptr};
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
