// Frames to and from the other nodes of a deployment, over the ZeroMQ sockets that pyzmq made. A frame of the exchange
// under way, or of a later one, waits in a stash until it is requested. All other frames are dropped and counted. Frames
// belong to lanes: independent series of messages over the same sockets, each with a step of its own.
#pragma once

#include <array>
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "header.hpp"
#include "zeromq.hpp"

namespace tpi {

class Frames {
public:
    // `spin` is the number of seconds that a wait polls before it sleeps.
    Frames(const std::string& library, uint32_t rank, uint32_t size, uint64_t session, uint32_t epoch, double spin)
        : zmq_(library), rank_(rank), session_(session), epoch_(epoch), spin_(spin), lines_(size) {}
    Frames(const Frames&) = delete;
    Frames& operator=(const Frames&) = delete;

    uint32_t rank() const { return rank_; }
    size_t dropped() const { return dropped_; }

    // Uses `socket` for the frames of `rank`. It must stay open until close(). On a ROUTER, which several ranks share,
    // `name` is the rank's routing id; on a DEALER it is empty.
    void connect(uint32_t rank, void* socket, std::string name) {
        lines_.at(rank) = {socket, std::move(name)};
        if (!lines_[rank].name.empty()) ranks_[lines_[rank].name] = static_cast<int>(rank);
    }

    // Opens `lane`. Frames of lanes that are not open are dropped.
    void open(uint32_t lane) {
        if (lane >= kLanes) throw std::invalid_argument("there is no lane " + std::to_string(lane));
        lanes_[lane] = Lane{};
    }

    // Goes to `step` on `lane`, and drops its frames of earlier steps.
    void begin(uint32_t lane, uint32_t step) {
        lanes_[lane] = Lane{step, 0};
        dropped_ += std::erase_if(stash_, [&](const auto& item) {
            return lane_of(item.first.tag) == lane && item.first.step < step;
        });
    }

    // Treats frames of messages before `number` of `lane` as stale from now on.
    void forget_before(uint32_t lane, uint32_t number) { lanes_[lane]->oldest = number; }

    // Returns the header of a frame that `rank` sends in this step of `lane`.
    Header header(uint32_t lane, uint32_t rank, uint32_t number, uint32_t segment, uint8_t wire, size_t values) const {
        const uint32_t tag = lane << (kNumberBits + kSegmentBits) | number << kSegmentBits | segment;
        return {kMagic, kVersion, wire, static_cast<uint16_t>(rank), session_, epoch_, lanes_[lane]->step, tag,
                static_cast<uint32_t>(values)};
    }

    // Returns a frame with this header, whose payload the caller has to write.
    Frame make(const Header& header, size_t payload) const {
        Frame made(zmq_, sizeof header + payload);
        std::memcpy(made.data(), &header, sizeof header);
        return made;
    }

    // Sends a frame without waiting. Returns false if `rank` is not connected or its queue is full.
    bool offer(uint32_t rank, Frame frame) const {
        const Line& line = connected(rank);
        int error = 0;
        if (!line.name.empty() && zmq_.send(line.socket, line.name.data(), line.name.size(), kSendMore | kDontWait) < 0)
            error = zmq_.error();
        else
            error = frame.send(line.socket, kDontWait);
        if (error && error != EAGAIN && error != EINTR && error != kHostUnreachable) fail("sent", error);
        return !error;
    }

    // Returns the frame with this header and `payload` bytes, from the stash or from its sender's socket; nothing if it
    // has not come within kSlice seconds.
    std::optional<Frame> take(const Header& header, size_t payload) {
        auto fits = [&](const Frame& frame) {
            return frame.size() == sizeof(Header) + payload && !std::memcmp(frame.data(), &header, sizeof header);
        };
        if (auto found = stash_.find({header.rank, header.step, header.tag}); found != stash_.end()) {
            Frame frame = std::move(found->second);
            stash_.erase(found);
            if (fits(frame)) return frame;
            ++dropped_;
        }
        const Line& line = connected(header.rank);
        const auto begun = Clock::now();
        auto spent = [&] { return std::chrono::duration<double>(Clock::now() - begun).count(); };
        while (spent() < kSlice) {
            Frame frame(zmq_);
            auto [sender, error] = receive_one(line, spent() < spin_ ? kDontWait : 0, frame);
            if (error == EAGAIN && spent() < spin_) continue;
            if (error == EAGAIN || error == EINTR) return std::nullopt;
            if (error) fail("received", error);
            if (sender == header.rank && fits(frame)) return frame;
            keep(sender, std::move(frame));
        }
        return std::nullopt;
    }

    // Stashes all frames that have arrived, without waiting, so that nodes with full queues do not block each other.
    void drain() {
        for (const Line& line : lines_)
            while (line.socket) {
                Frame frame(zmq_);
                auto [sender, error] = receive_one(line, kDontWait, frame);
                if (error) break;
                keep(sender, std::move(frame));
            }
    }

    // Drops all frames. The sockets may then be closed.
    void close() {
        stash_.clear();
        ranks_.clear();
        for (Line& line : lines_) line = {};
    }

private:
    using Clock = std::chrono::steady_clock;

    static constexpr size_t kStash = 4096;  // most frames, of all nodes together; a node is at most two exchanges ahead
    static constexpr double kSlice = 0.1;   // longest single attempt to receive, in seconds
    static constexpr int kStranger = -1;

    struct Line {
        void* socket = nullptr;
        std::string name;
    };
    struct Key {
        uint32_t rank, step, tag;
        auto operator<=>(const Key&) const = default;
    };
    struct Lane {
        uint32_t step = 0;
        uint32_t oldest = 0;  // number of the first message of the oldest exchange under way
    };

    static uint32_t lane_of(uint32_t tag) { return tag >> (kNumberBits + kSegmentBits); }
    static uint32_t number_of(uint32_t tag) { return tag >> kSegmentBits & ((1u << kNumberBits) - 1); }

    [[noreturn]] static void fail(const char* what, int error) {
        throw std::runtime_error(std::string("a frame was not ") + what + ": " + std::strerror(error));
    }

    const Line& connected(uint32_t rank) const {
        const Line& line = lines_.at(rank);
        if (!line.socket) throw std::invalid_argument("rank " + std::to_string(rank) + " is not connected");
        return line;
    }

    // Receives the next message on a line's socket. Returns its sender and an error number or 0. `frame` is empty if
    // the message does not have exactly one frame.
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
        if (frame.more()) {  // not from a node of the group: discard the other frames
            while (frame.more()) frame.receive(line.socket, 0);
            frame = Frame(zmq_);
        }
        return {sender, 0};
    }

    // Stashes a frame of the current or a later exchange; drops any other.
    void keep(int sender, Frame frame) {
        Header header{};
        if (frame.size() >= sizeof header) std::memcpy(&header, frame.data(), sizeof header);
        const bool known = header.magic == kMagic && header.version == kVersion && sender == header.rank &&
                           header.session == session_ && header.epoch == epoch_;
        const std::optional<Lane>& lane = lanes_[lane_of(header.tag)];
        const bool early =
            lane && std::pair(header.step, number_of(header.tag)) >= std::pair(lane->step, lane->oldest);
        if (sender < 0 || !known || !early || stash_.size() >= kStash)
            ++dropped_;
        else
            stash_.insert_or_assign({header.rank, header.step, header.tag}, std::move(frame));
    }

    ZeroMq zmq_;
    uint32_t rank_;
    uint64_t session_;
    uint32_t epoch_;
    double spin_;
    std::vector<Line> lines_;           // by rank
    std::map<std::string, int> ranks_;  // by name
    std::map<Key, Frame> stash_;
    std::array<std::optional<Lane>, kLanes> lanes_;
    size_t dropped_ = 0;
};

}  // namespace tpi
