// The Python module tpi.kernels._native. tpi/kernels/native.py is its only caller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "chain.hpp"

NB_MODULE(_native, m) {
    using namespace tpi;
    static nb::object kernel_error = nb::module_::import_("tpi.errors").attr("KernelError");
    kernel_error.inc_ref();  // for the life of the process
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const KernelError& error) {
            PyErr_SetString(kernel_error.ptr(), error.what());
        }
    });

    // constants that Python imports: tpi/kernels/constants.py
    m.attr("PAGE_TOKENS") = kPageTokens;
    m.attr("GROUP") = kGroup;
    m.attr("KV_GROUP") = kGroup;
    m.attr("KV_RUN") = kCodeRun;
    m.attr("KV_WORD") = kWordBytes;
    m.attr("STREAM_TOKENS") = kStreamTokens;
    m.attr("THREADS_MOST") = kMostThreads;
    m.attr("TILE_OUTPUTS") = kTileOutputs;
    m.def("slices", &slices_of, nb::arg("threads"));

    m.def("isa", [] { return std::string(kernels().name); });
    m.def("available_isas", [] {
        std::vector<std::string> names;
        for (const Kernels* each : available_kernels()) names.emplace_back(each->name);
        return names;
    });
    m.def("use_isa", &use_kernels);
    m.def("set_threads", [](size_t count) {
        if (count < 1 || count > kMostThreads)
            throw KernelError("the number of threads must be 1 to " + std::to_string(kMostThreads));
        nb::gil_scoped_release unlocked;
        try {
            Pool::instance().resize(count);
        } catch (const std::system_error& error) {
            throw KernelError("the system does not start " + std::to_string(count) + " threads (" +
                              error.code().message() + "); use fewer with --threads, or raise its limit (ulimit -u)");
        }
    });
    m.def("threads", [] { return Pool::instance().size(); });
    m.def("read", &run_read, nb::arg("data"));
    m.def("norm", &run_norm, nb::arg("x"), nb::arg("norm"), nb::arg("out"));

    nb::class_<PreparedInput>(m, "Prepared")
        .def(nb::init<>())
        .def_prop_ro("shape", [](const PreparedInput& self) { return nb::make_tuple(self.tokens(), self.hidden()); })
        .def("copy", &PreparedInput::copy);
    nb::class_<AttentionPlan>(m, "AttentionPlan")
        .def(nb::init<nb::tuple, nb::tuple, nb::tuple, nb::tuple, nb::object, nb::tuple, nb::tuple, nb::object,
                      nb::object>(),
             nb::arg("query"), nb::arg("kv"), nb::arg("norm"), nb::arg("shape"), nb::arg("kv_index"),
             nb::arg("vectors"), nb::arg("numbers"), nb::arg("latent").none() = nb::none(),
             nb::arg("query_latent").none() = nb::none())
        .def("run", &AttentionPlan::run)
        .def("prepare", &AttentionPlan::prepare)
        .def("project", &AttentionPlan::project)
        .def("attend", &AttentionPlan::attend)
        .def("output", &AttentionPlan::output);
    nb::class_<RecurrentPlan>(m, "RecurrentPlan")
        .def("run", &RecurrentPlan::run, nb::arg("data"), nb::arg("x"), nb::arg("states"), nb::arg("sequence"),
             nb::arg("slots"), nb::arg("out"), nb::arg("squares").none() = nb::none())
        .def("prepare", &RecurrentPlan::prepare);
    nb::class_<ConvPlan, RecurrentPlan>(m, "ConvPlan")
        .def(nb::init<nb::tuple, nb::tuple, nb::tuple, nb::object>(), nb::arg("values"), nb::arg("norm"),
             nb::arg("shape"), nb::arg("weights"));
    nb::class_<DeltaPlan, RecurrentPlan>(m, "DeltaPlan")
        .def(nb::init<nb::tuple, nb::tuple, nb::tuple, nb::tuple, nb::object, nb::tuple>(), nb::arg("values"),
             nb::arg("keys"), nb::arg("norm"), nb::arg("shape"), nb::arg("key_index"), nb::arg("vectors"));
    nb::class_<MambaPlan, RecurrentPlan>(m, "MambaPlan")
        .def(nb::init<nb::tuple, nb::tuple, nb::tuple, nb::tuple, nb::object, nb::tuple, nb::tuple>(),
             nb::arg("values"), nb::arg("keys"), nb::arg("norm"), nb::arg("shape"), nb::arg("key_index"),
             nb::arg("vectors"), nb::arg("numbers"));
    nb::class_<FfnPlan>(m, "FfnPlan")
        .def(nb::init<nb::tuple, nb::tuple, const std::string&, bool, nb::object, nb::object, float, float>(),
             nb::arg("neuron"), nb::arg("norm"), nb::arg("activation"), nb::arg("gated"), nb::arg("gate_bias").none(),
             nb::arg("up_bias").none(), nb::arg("threshold") = 0.0f, nb::arg("slope") = 1.0f)
        .def("run", &FfnPlan::run, nb::arg("data"), nb::arg("x"), nb::arg("active").none(), nb::arg("out"))
        .def("prepare", &FfnPlan::prepare);
    nb::class_<RouterPlan>(m, "RouterPlan")
        .def(nb::init<nb::tuple, nb::tuple, nb::handle, nb::object, nb::object, nb::object, nb::object>(),
             nb::arg("settings"), nb::arg("norm"), nb::arg("weight"), nb::arg("bias").none(),
             nb::arg("choice").none(), nb::arg("shared").none(), nb::arg("factors").none())
        .def("route",
             nb::overload_cast<nb::handle, nb::handle, nb::handle, nb::object>(&RouterPlan::route, nb::const_),
             nb::arg("x"), nb::arg("experts"), nb::arg("weights"), nb::arg("shared").none());
    nb::class_<ExpertsPlan>(m, "ExpertsPlan")
        .def(nb::init<nb::object, nb::object, nb::object, std::vector<std::pair<size_t, size_t>>, nb::object,
                      std::vector<bool>>(),
             nb::arg("router"), nb::arg("routed"), nb::arg("shared").none(), nb::arg("pieces"),
             nb::arg("down_bias").none(), nb::arg("begins"))
        .def("prepare", &ExpertsPlan::prepare)
        .def("run", &ExpertsPlan::run, nb::arg("data"), nb::arg("x"), nb::arg("experts"), nb::arg("weights"),
             nb::arg("shared").none(), nb::arg("out"))
        .def("run_pieces", &ExpertsPlan::run_pieces, nb::arg("data"), nb::arg("beside").none(), nb::arg("x"),
             nb::arg("experts"), nb::arg("weights"), nb::arg("shared").none(), nb::arg("out"));
    nb::class_<Chain>(m, "Chain")
        .def(nb::init<size_t>())
        .def("attention", &Chain::attention, nb::arg("plan"), nb::arg("data"), nb::arg("keys").none(),
             nb::arg("values").none(), nb::arg("residual"))
        .def("recur", &Chain::recur)
        .def("ffn", &Chain::ffn)
        .def("experts", &Chain::experts)
        .def("run", &Chain::run, nb::arg("x"), nb::arg("positions"), nb::arg("sequence"), nb::arg("tables"),
             nb::arg("slots").none(), nb::arg("partial"), nb::arg("ended").none());
    nb::class_<RunPlan>(m, "RunPlan")
        .def(nb::init<nb::tuple>())
        .def("rows", &RunPlan::rows)
        .def("gather", &RunPlan::gather)
        .def("decode", &RunPlan::decode);
}
