// The Python module allreduce._mailbox: frames to and from the other members of a group, over the ZeroMQ sockets that
// pyzmq made. allreduce/transport.py is its only caller.
//
// A frame that belongs to the exchange under way, or to one that follows, waits in a stash until it is asked for;
// anything else is dropped and counted. Nothing is decided here of who is lost: who waits is told that nothing came.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <map>
#include <optional>
#include <utility>

#include "bfloat16_values.hpp"
#include "header.hpp"
#include "iothread.hpp"
#include "zeromq.hpp"

namespace nb = nanobind;

namespace tpi {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kStash = 4096;          // frames of all members together; none is further ahead than two exchanges
constexpr size_t kShared = 1 << 15;      // bytes: from here on several queues share one copy
constexpr size_t kLong = 1 << 16;        // bytes to send from here on keep the I/O thread busy for long
constexpr double kSlice = 0.1;           // seconds of one attempt to receive
constexpr int kStranger = -1;

enum Wire : uint8_t { kF32 = 0, kBf16 = 1 };

// Bytes of a contiguous array, for as long as this lives.
class Bytes {
public:
    Bytes(nb::handle array, bool writable) {
        if (PyObject_GetBuffer(array.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE)) throw nb::python_error();
    }
    ~Bytes() { PyBuffer_Release(&view_); }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
    size_t size() const { return static_cast<size_t>(view_.len); }

private:
    Py_buffer view_;
};

class Mailbox {
public:
    // `spin`: seconds that a wait polls before it sleeps.
    Mailbox(const std::string& library, uint32_t rank, uint32_t size, uint64_t session, uint32_t epoch, double spin)
        : zmq_(library), rank_(rank), session_(session), epoch_(epoch), spin_(spin), lines_(size) {}
    Mailbox(const Mailbox&) = delete;
    Mailbox& operator=(const Mailbox&) = delete;

    // Messages of `rank` pass through `socket`, which is not closed while this is used. A ROUTER, which several ranks
    // share, knows it by `name`; a DEALER has no names.
    void connect(uint32_t rank, uintptr_t socket, const nb::bytes& name) {
        lines_.at(rank) = {reinterpret_cast<void*>(socket), std::string(name.c_str(), name.size())};
        if (name.size()) ranks_[lines_[rank].name] = static_cast<int>(rank);
    }

    // Go to `step` and forget what is left of earlier ones.
    void begin(uint32_t step) {
        step_ = step;
        oldest_ = 0;
        dropped_ += std::erase_if(stash_, [&](const auto& item) { return item.first.step < step; });
    }

    // From here on frames of messages before `number` are late.
    void reserve(uint32_t number) { oldest_ = number; }

    // Offer to each of `ranks`, as message `tag`, `count` values: `values` in float32, or the payload's own bytes if
    // `raw`. Returns those that do not take it now, since they are not connected or have too much queued: nobody is
    // waited for.
    std::vector<uint32_t> send(const std::vector<uint32_t>& ranks, uint32_t tag, uint8_t wire, uint32_t count,
                               nb::handle values, bool raw) {
        Bytes from(values, false);
        if (!raw && from.size() != 4 * size_t{count}) throw std::invalid_argument("those are not as many values");
        const size_t payload = raw ? from.size() : payload_bytes(wire, count);
        const Header header = expected(rank_, tag, wire, count);
        nb::gil_scoped_release unlocked;
        payload * ranks.size() < kLong ? io_.follow() : io_.release();
        auto frame = [&] {
            Frame made(zmq_, sizeof header + payload);
            std::memcpy(made.data(), &header, sizeof header);
            encode(from, wire, raw, made.data() + sizeof header);
            return made;
        };
        std::optional<Frame> shared;
        if (ranks.size() > 1 && payload > kShared) shared = frame();
        std::vector<uint32_t> left;
        for (uint32_t rank : ranks) {
            const int error = send_one(lines_.at(rank), shared ? shared->shared() : frame());
            if (error == EAGAIN || error == EINTR || error == kHostUnreachable)
                left.push_back(rank);
            else if (error)
                fail("sent", error);
        }
        return left;
    }

    // Wait a while for message `tag` of `rank`, which has `count` values, and write or add them to `out`: float32, or
    // the payload's own bytes if `out` has just room for them and `raw`. Returns false if the message has not come yet.
    bool receive(uint32_t rank, uint32_t tag, uint8_t wire, uint32_t count, nb::handle out, bool add, bool raw) {
        Bytes to(out, true);
        if (!raw && to.size() != 4 * size_t{count}) throw std::invalid_argument("out has no room for the values");
        return unlocked([&](int& error) { return arrived(rank, tag, wire, count, to, add, raw, error); });
    }

    // Write to `out` the sum in rank order of everyone's message `tag` and this member's own `values`, all in float32.
    // Goes on at rank `next` and waits a while. Returns the rank that is missing, the number of members at the end.
    uint32_t sum(uint32_t next, uint32_t tag, uint8_t wire, nb::handle values, nb::handle out) {
        Bytes own(values, false), to(out, true);
        if (own.size() != to.size()) throw std::invalid_argument("out has no room for the values");
        const auto count = static_cast<uint32_t>(to.size() / sizeof(float));
        unlocked([&](int& error) {
            for (; next < lines_.size(); ++next) {
                if (next == rank_)
                    deliver(own.data(), kF32, count, to, next > 0, false);
                else if (!arrived(next, tag, wire, count, to, next > 0, false, error))
                    return false;
            }
            return true;
        });
        return next;
    }

    // Take in what has come already, without waiting: so that no two members block each other.
    void drain() {
        nb::gil_scoped_release unlocked;
        for (const Line& line : lines_)
            while (line.socket) {
                Frame frame(zmq_);
                auto [sender, error] = receive_one(line, kDontWait, frame);
                if (error) break;
                keep(sender, std::move(frame));
            }
    }

    // Frames dropped since the last call.
    size_t take_dropped() { return std::exchange(dropped_, 0); }

    // Drop everything; the sockets may then be closed.
    void close() {
        io_.release();
        stash_.clear();
        ranks_.clear();
        for (Line& line : lines_) line = {};
    }

private:
    struct Line {
        void* socket = nullptr;
        std::string name;
    };
    struct Key {
        uint32_t rank, step, tag;
        auto operator<=>(const Key&) const = default;
    };

    [[noreturn]] static void fail(const char* what, int error) {
        throw std::runtime_error(std::string("a frame was not ") + what + ": " + std::strerror(error));
    }

    Header expected(uint32_t rank, uint32_t tag, uint8_t wire, uint32_t values) const {
        return {kMagic, kVersion, wire, static_cast<uint16_t>(rank), session_, epoch_, step_, tag, values};
    }

    // What `work` returns, done without the interpreter's lock; `work` says what went wrong while it waited.
    template <class Work>
    bool unlocked(Work work) const {
        int error = 0;
        bool done;
        {
            nb::gil_scoped_release released;
            done = work(error);
        }
        if (error == EINTR && PyErr_CheckSignals()) throw nb::python_error();
        if (error && error != EAGAIN && error != EINTR) fail("received", error);
        return done;
    }

    int send_one(const Line& line, Frame frame) const {
        if (!line.socket) throw std::invalid_argument("that rank is not connected");
        if (!line.name.empty() && zmq_.send(line.socket, line.name.data(), line.name.size(), kSendMore | kDontWait) < 0)
            return zmq_.error();
        return frame.send(line.socket, kDontWait);
    }

    static size_t payload_bytes(uint8_t wire, size_t count) { return (wire == kBf16 ? 2 : 4) * count; }

    static void encode(const Bytes& from, uint8_t wire, bool raw, uint8_t* to) {
        if (raw || wire == kF32)
            std::memcpy(to, from.data(), from.size());
        else
            narrow(reinterpret_cast<const float*>(from.data()), from.size() / sizeof(float), to);
    }

    // Whether a message has come within a slice; if so it is written or added to `to`.
    bool arrived(uint32_t rank, uint32_t tag, uint8_t wire, uint32_t count, const Bytes& to, bool add, bool raw,
                 int& error) {
        const size_t payload = raw ? to.size() : payload_bytes(wire, count);
        std::optional<Frame> frame = take(expected(rank, tag, wire, count), payload, error);
        if (frame) deliver(frame->data() + sizeof(Header), wire, count, to, add, raw);
        return frame.has_value();
    }

    static void deliver(const uint8_t* from, uint8_t wire, size_t values, const Bytes& to, bool add, bool raw) {
        auto* out = reinterpret_cast<float*>(to.data());
        if (raw || (wire == kF32 && !add)) {
            std::memcpy(to.data(), from, to.size());
        } else if (wire == kBf16) {
            widen(from, values, add, out);
        } else {
            for (size_t i = 0; i < values; ++i) {
                float value;
                std::memcpy(&value, from + sizeof value * i, sizeof value);
                out[i] += value;
            }
        }
    }

    // The frame that `header` describes, from the stash or from its sender's socket, waited for during one slice.
    std::optional<Frame> take(const Header& header, size_t payload, int& error) {
        auto fits = [&](const Frame& frame) {
            return frame.size() == sizeof(Header) + payload && !std::memcmp(frame.data(), &header, sizeof header);
        };
        if (auto found = stash_.find({header.rank, header.step, header.tag}); found != stash_.end()) {
            Frame frame = std::move(found->second);
            stash_.erase(found);
            if (fits(frame)) return frame;
            ++dropped_;
        }
        const Line& line = lines_.at(header.rank);
        if (!line.socket) throw std::invalid_argument("that rank is not connected");
        const auto begun = Clock::now();
        auto spent = [&] { return std::chrono::duration<double>(Clock::now() - begun).count(); };
        while (spent() < kSlice) {
            Frame frame(zmq_);
            auto [sender, failed] = receive_one(line, spent() < spin_ ? kDontWait : 0, frame);
            if (failed == EAGAIN && spent() < spin_) continue;
            if ((error = failed)) return std::nullopt;
            if (sender == header.rank && fits(frame)) return frame;
            keep(sender, std::move(frame));
        }
        return std::nullopt;
    }

    // The next message on a line's socket: its sender, and what went wrong or 0. `frame` is empty if it is not one frame.
    std::pair<int, int> receive_one(const Line& line, int flags, Frame& frame) const {
        if (int error = frame.receive(line.socket, flags)) return {kStranger, error};
        int sender = kStranger;
        if (line.name.empty()) {
            sender = static_cast<int>(&line - lines_.data());
        } else {
            auto found = ranks_.find(std::string(reinterpret_cast<const char*>(frame.data()), frame.size()));
            if (found != ranks_.end()) sender = found->second;
            if (!frame.more()) {
                frame = Frame(zmq_);
                return {sender, 0};
            }
            frame.receive(line.socket, 0);
        }
        if (frame.more()) {  // no member sends more: take the rest off the socket
            while (frame.more()) frame.receive(line.socket, 0);
            frame = Frame(zmq_);
        }
        return {sender, 0};
    }

    // Stash a frame that is early; drop one that is anything else.
    void keep(int sender, Frame frame) {
        Header header{};
        if (frame.size() >= sizeof header) std::memcpy(&header, frame.data(), sizeof header);
        const bool known = header.magic == kMagic && header.version == kVersion && sender == header.rank &&
                           header.session == session_ && header.epoch == epoch_;
        const bool early = std::pair(header.step, header.tag >> kSegmentBits) >= std::pair(step_, oldest_);
        if (sender < 0 || !known || !early || stash_.size() >= kStash)
            ++dropped_;
        else
            stash_.insert_or_assign({header.rank, header.step, header.tag}, std::move(frame));
    }

    ZeroMq zmq_;
    IoThread io_;
    uint32_t rank_;
    uint64_t session_;
    uint32_t epoch_;
    double spin_;
    std::vector<Line> lines_;            // by rank
    std::map<std::string, int> ranks_;   // by name
    std::map<Key, Frame> stash_;
    uint32_t step_ = 0;
    uint32_t oldest_ = 0;  // number of the first message of the oldest exchange under way
    size_t dropped_ = 0;
};

}  // namespace
}  // namespace tpi

NB_MODULE(_mailbox, m) {
    using tpi::Mailbox;
    nb::class_<Mailbox>(m, "Mailbox")
        .def(nb::init<const std::string&, uint32_t, uint32_t, uint64_t, uint32_t, double>(), nb::arg("library"),
             nb::arg("rank"), nb::arg("size"), nb::arg("session"), nb::arg("epoch"), nb::arg("spin"))
        .def("connect", &Mailbox::connect, nb::arg("rank"), nb::arg("socket"), nb::arg("name"))
        .def("begin", &Mailbox::begin, nb::arg("step"))
        .def("reserve", &Mailbox::reserve, nb::arg("number"))
        .def("send", &Mailbox::send, nb::arg("ranks"), nb::arg("tag"), nb::arg("wire"), nb::arg("count"),
             nb::arg("values"), nb::arg("raw"))
        .def("receive", &Mailbox::receive, nb::arg("rank"), nb::arg("tag"), nb::arg("wire"), nb::arg("count"),
             nb::arg("out"), nb::arg("add"), nb::arg("raw"))
        .def("sum", &Mailbox::sum, nb::arg("next"), nb::arg("tag"), nb::arg("wire"), nb::arg("values"), nb::arg("out"))
        .def("drain", &Mailbox::drain)
        .def("take_dropped", &Mailbox::take_dropped)
        .def("close", &Mailbox::close);
}
